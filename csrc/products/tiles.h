// Matrix products of float32 by tiles of registers.
//
// [Note: Accumulation order of a product]
// An element of C is one chain of fused multiply-adds over a segment of the inner dim, from its start on, and the sums of
// segments are added in order. Which rows and columns lie next to it, how they are cut into tiles, and how many threads
// there are decide nothing: a row of A gives the same bits alone and among a thousand. (Without fused operations, as on
// SSE2, each product is rounded.)
#pragma once

#include <stdint.h>
#include <string.h>

#include "../kernels/isa.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16, MOST_ROWS = 14 };
typedef float lanes __attribute__((vector_size(64)));
static inline lanes fused(lanes x, lanes y, lanes sum) { return (lanes)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum); }
#elif defined(__AVX2__)
enum { LANES = 8, MOST_ROWS = 6 };
typedef float lanes __attribute__((vector_size(32)));
static inline lanes fused(lanes x, lanes y, lanes sum) { return (lanes)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum); }
#else
enum { LANES = 4, MOST_ROWS = 6 };
typedef float lanes __attribute__((vector_size(16)));
#if defined(__aarch64__)
#include <arm_neon.h>
static inline lanes fused(lanes x, lanes y, lanes sum) { return (lanes)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y); }
#else
static inline lanes fused(lanes x, lanes y, lanes sum) { return x * y + sum; }
#endif
#endif

enum { TILE_COLUMNS = 2 * LANES };
static const int64_t LINE = 64 / sizeof(float);  // of a cache

static inline lanes lanes_at(const float* from) {
    lanes found;
    memcpy(&found, from, sizeof found);
    return found;
}

// What will be packed next, fetched a cache line a turn while tiles are computed.
typedef struct {
    const float* from;
    int64_t step, turn;  // from line to line, and after TILE_COLUMNS of them
} ahead_of;

// C[ROWS, columns] (+)= A @ B for packed A (inner, ROWS) and packed B (inner, TILE_COLUMNS).
template <int ROWS>
static void product_tile(int64_t inner, const float* __restrict a, const float* __restrict b, float* __restrict c,
                         int64_t c_row, int64_t columns, bool adds, ahead_of ahead) {
    lanes sums[ROWS][2] = {};
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < TILE_COLUMNS; i += LINE) __builtin_prefetch(c + r * c_row + i, 1, 3);
    for (uint64_t k = 0; k < (uint64_t)inner; k++) {
        __builtin_prefetch(ahead.from + (int64_t)(k % TILE_COLUMNS) * ahead.step + (int64_t)(k / TILE_COLUMNS) * ahead.turn);
        const lanes left = lanes_at(b), right = lanes_at(b + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const lanes x = a[r] - (lanes){};
            sums[r][0] = fused(x, left, sums[r][0]);
            sums[r][1] = fused(x, right, sums[r][1]);
        }
        a += ROWS;
        b += TILE_COLUMNS;
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        float* const to = c + r * c_row;
        lanes total[2] = {sums[r][0], sums[r][1]};
        if (columns == TILE_COLUMNS) {
            if (adds) {
                total[0] = lanes_at(to) + total[0];
                total[1] = lanes_at(to + LANES) + total[1];
            }
            memcpy(to, total, sizeof total);
        } else {
            float found[TILE_COLUMNS];
            memcpy(found, total, sizeof found);
            for (int64_t i = 0; i < columns; i++) to[i] = adds ? to[i] + found[i] : found[i];
        }
    }
}

typedef void (*product_tiles)(int64_t, const float*, const float*, float*, int64_t, int64_t, bool, ahead_of);

static product_tiles tiles_of(int64_t rows) {
    static const product_tiles found[] = {
        product_tile<1>,  product_tile<2>,  product_tile<3>,  product_tile<4>, product_tile<5>, product_tile<6>,
#if defined(__AVX512F__)
        product_tile<7>,  product_tile<8>,  product_tile<9>,  product_tile<10>,
        product_tile<11>, product_tile<12>, product_tile<13>, product_tile<14>,
#endif
    };
    return found[rows - 1];
}

// Rows are cut into as few panels as registers allow, of nearly equal height.
static inline int64_t panels_of(int64_t rows) { return (rows + MOST_ROWS - 1) / MOST_ROWS; }
static inline int64_t panel_start(int64_t rows, int64_t panel) {
    const int64_t panels = panels_of(rows), more = rows % panels;
    return panel * (rows / panels) + (panel < more ? panel : more);
}

#if defined(__AVX2__)
static inline __m256 two_quarters(const float* low, const float* high) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}

// to[k * to_row + j] = from[j * from_row + k] for 8 by 8 elements.
static inline void transpose_block(const float* from, int64_t from_row, float* to, int64_t to_row) {
    __m256 rows[8], pairs[8];
    for (int i = 0; i < 4; i++) {
        rows[i] = two_quarters(from + i * from_row, from + (i + 4) * from_row);
        rows[i + 4] = two_quarters(from + i * from_row + 4, from + (i + 4) * from_row + 4);
    }
    for (int half = 0; half < 8; half += 4) {
        pairs[half] = _mm256_unpacklo_ps(rows[half], rows[half + 1]);
        pairs[half + 1] = _mm256_unpackhi_ps(rows[half], rows[half + 1]);
        pairs[half + 2] = _mm256_unpacklo_ps(rows[half + 2], rows[half + 3]);
        pairs[half + 3] = _mm256_unpackhi_ps(rows[half + 2], rows[half + 3]);
        _mm256_storeu_ps(to + half * to_row, _mm256_shuffle_ps(pairs[half], pairs[half + 2], 0x44));
        _mm256_storeu_ps(to + (half + 1) * to_row, _mm256_shuffle_ps(pairs[half], pairs[half + 2], 0xee));
        _mm256_storeu_ps(to + (half + 2) * to_row, _mm256_shuffle_ps(pairs[half + 1], pairs[half + 3], 0x44));
        _mm256_storeu_ps(to + (half + 3) * to_row, _mm256_shuffle_ps(pairs[half + 1], pairs[half + 3], 0xee));
    }
}
#endif

// to[k * width + j] = from[j * from_column + k * from_row] for `count` of `width` columns; zeros for the others.
static void pack(const float* __restrict from, int64_t from_row, int64_t from_column, int64_t inner, int64_t count,
                 int64_t width, float* __restrict to) {
    if (from_column == 1) {
        if (count == TILE_COLUMNS && width == TILE_COLUMNS)
            for (int64_t k = 0; k < inner; k++) memcpy(to + k * width, from + k * from_row, sizeof(float) * TILE_COLUMNS);
        else
            for (int64_t k = 0; k < inner; k++) {
                for (int64_t j = 0; j < count; j++) to[k * width + j] = from[k * from_row + j];
                for (int64_t j = count; j < width; j++) to[k * width + j] = 0;
            }
        return;
    }
    int64_t done = 0;
#if defined(__AVX2__)
    if (from_row == 1)
        for (; done + 8 <= count; done += 8) {
            int64_t k = 0;
            for (; k + 8 <= inner; k += 8)
                transpose_block(from + done * from_column + k, from_column, to + k * width + done, width);
            for (; k < inner; k++)
                for (int64_t j = done; j < done + 8; j++) to[k * width + j] = from[j * from_column + k];
        }
#endif
    for (int64_t j = done; j < count; j++)
        for (int64_t k = 0; k < inner; k++) to[k * width + j] = from[j * from_column + k * from_row];
    for (int64_t j = count; j < width; j++)
        for (int64_t k = 0; k < inner; k++) to[k * width + j] = 0;
}

// A, whose columns in `pack`'s sense are its rows, panel after panel.
static void pack_rows(const pa_product* p, float* to) {
    for (int64_t panel = 0; panel < panels_of(p->rows); panel++) {
        const int64_t start = panel_start(p->rows, panel), height = panel_start(p->rows, panel + 1) - start;
        pack(p->a + start * p->a_row, p->a_column, p->a_row, p->inner, height, height, to + start * p->inner);
    }
}

// The columns [start, start + TILE_COLUMNS) of C, of packed rows; `scratch` is for inner * TILE_COLUMNS elements, `next` is
// the first element of B that will be packed after this.
static void product_columns(const pa_product* p, const int64_t* segments, const float* rows, int64_t start,
                            const float* next, float* scratch) {
    const int64_t columns = smaller(TILE_COLUMNS, p->columns - start);
    pack(p->b + start * p->b_column, p->b_row, p->b_column, p->inner, columns, TILE_COLUMNS, scratch);
    const bool is_transposed = p->b_row == 1;
    ahead_of ahead = {next, p->b_row, TILE_COLUMNS * p->b_row};
    if (is_transposed) ahead = {next, p->b_column, LINE};
    const int64_t more = is_transposed ? p->inner / TILE_COLUMNS * LINE : LINE;  // from one panel to the next
    for (int64_t panel = 0; panel < panels_of(p->rows); panel++) {
        const int64_t first = panel_start(p->rows, panel), height = panel_start(p->rows, panel + 1) - first;
        const product_tiles tile = tiles_of(height);
        float* const to = p->c + first * p->c_row + start;
        if (panel && (panel < 2 || is_transposed)) ahead.from += more;
        int64_t k = 0;
        for (int64_t i = 0; i < p->segments; k += segments[i++])
            if (segments[i] || i == 0)
                tile(segments[i], rows + first * p->inner + k * height, scratch + k * TILE_COLUMNS, to, p->c_row, columns,
                     i > 0, ahead);
    }
}
