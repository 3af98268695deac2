// Linear layers of few rows: each weight is read once from memory, which is the limit of decoding.
//
// [Note: Rows of a linear layer]
// An output is one chain of fused multiply-adds in every lane, in the order of the inner dim, and lanes are added in pairs.
// Rows next to it decide nothing: a row has the same bits alone and among others. Weights are used where they lie, by
// rows of outputs (torch's Linear) or of inputs (GPT-2's Conv1D).
#pragma once

#include "../kernels/numbers.h"
#include "../products/tiles.h"

#if defined(__AVX512F__)
enum { DOT_ROWS = 6, WIDE_ROWS = 8, WIDE = 3, WIDE_ALONE = 8 };
#else
enum { DOT_ROWS = 2, WIDE_ROWS = 4, WIDE = 2, WIDE_ALONE = 4 };
#endif

static inline lanes widened(const float* from) { return lanes_at(from); }

typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

static inline lanes widened(const uint16_t* from) {
    halves found;
    memcpy(&found, from, sizeof found);
    return (lanes)(__builtin_convertvector(found, words) << 16);
}

static inline float widened_one(const float* from) { return *from; }
static inline float widened_one(const uint16_t* from) { return from_bfloat16(*from); }
static inline void store_one(float* to, float value) { *to = value; }
static inline void store_one(uint16_t* to, float value) { *to = to_bfloat16(value); }

template <typename T>
static inline lanes widened_some(const T* from, int64_t count) {
    T some[LANES] = {};
    memcpy(some, from, sizeof(T) * (uint64_t)count);
    return widened(some);
}

static inline float lanes_sum(lanes value) {
    float parts[LANES];
    memcpy(parts, &value, sizeof parts);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

typedef float four __attribute__((vector_size(16)));

// The same of four vectors at a time, which takes half of the instructions.
static inline four lanes_sums(lanes a, lanes b, lanes c, lanes d) {
#if defined(__AVX512F__)
    // With masks, because GCC 12 warns of those without.
    enum { ALL = 0xffff };
    const __m512 x = (__m512)a, y = (__m512)b, z = (__m512)c, u = (__m512)d;
    const __m512 left = _mm512_add_ps(_mm512_maskz_shuffle_f32x4(ALL, x, y, 0x44), _mm512_maskz_shuffle_f32x4(ALL, x, y, 0xee));
    const __m512 right = _mm512_add_ps(_mm512_maskz_shuffle_f32x4(ALL, z, u, 0x44), _mm512_maskz_shuffle_f32x4(ALL, z, u, 0xee));
    const __m512 both = _mm512_add_ps(_mm512_maskz_shuffle_f32x4(ALL, left, right, 0x88),
                                      _mm512_maskz_shuffle_f32x4(ALL, left, right, 0xdd));
    const __m512 pairs = _mm512_add_ps(both, _mm512_maskz_shuffle_ps(ALL, both, both, 0x4e));
    const __m512 sums = _mm512_add_ps(pairs, _mm512_maskz_shuffle_ps(ALL, pairs, pairs, 0xb1));
    const __m512 found = _mm512_maskz_compress_ps(0x1111, sums);
    four low;
    memcpy(&low, &found, sizeof low);
    return low;
#else
    return (four){lanes_sum(a), lanes_sum(b), lanes_sum(c), lanes_sum(d)};
#endif
}

template <typename T>
static inline void put_output(const pa_linear* p, int64_t row, int64_t column, float value) {
    if (p->bias) value += widened_one((const T*)p->bias + column);
    store_one((T*)p->y + row * p->y_row + column, value);
}

// The same of as many neighbours as V has.
template <typename T, typename V>
static inline void put_outputs(const pa_linear* p, int64_t row, int64_t column, V value) {
    enum { COUNT = sizeof(V) / sizeof(float) };
    float found[COUNT], bias[COUNT];
    memcpy(found, &value, sizeof found);
    if (p->bias) {
        const T* const from = (const T*)p->bias + column;
        for (int i = 0; i < COUNT; i++) bias[i] = widened_one(from + i);
        for (int i = 0; i < COUNT; i++) found[i] += bias[i];
    }
    T* const to = (T*)p->y + row * p->y_row + column;
    for (int i = 0; i < COUNT; i++) store_one(to + i, found[i]);
}

// The sums of a tile to its outputs.
template <typename T, int ROWS, int OUTPUTS>
static inline __attribute__((always_inline)) void put_tile(const pa_linear* p, int64_t row, int64_t column, const lanes (&sums)[ROWS][OUTPUTS]) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        int o = 0;
#pragma GCC unroll 4
        for (; o + 4 <= OUTPUTS; o += 4)
            put_outputs<T>(p, row + r, column + o, lanes_sums(sums[r][o], sums[r][o + 1], sums[r][o + 2], sums[r][o + 3]));
#pragma GCC unroll 4
        for (; o < OUTPUTS; o++) put_output<T>(p, row + r, column + o, lanes_sum(sums[r][o]));
    }
}

// The sums of at most four outputs of one row.
template <typename T>
static inline void put_alone(const pa_linear* p, int64_t column, int64_t count, const lanes (&sums)[4]) {
    if (count == 4)
        put_outputs<T>(p, 0, column, lanes_sums(sums[0], sums[1], sums[2], sums[3]));
    else
        for (int64_t o = 0; o < count; o++) put_output<T>(p, 0, column + o, lanes_sum(sums[o]));
}

// The weights of the tile after the next, fetched into the second cache, so many lines a turn, while this one is computed by
// all its panels. In the first cache they would take the place of inputs: 16 rows of fp32 then take 1.4 times as long.
typedef struct {
    const char* from;
    int64_t lines;
} next_lines;

static inline __attribute__((always_inline)) void fetch_ahead(next_lines* ahead) {
    for (int64_t i = 0; i < ahead->lines; i++) __builtin_prefetch(ahead->from + 64 * i, 0, 2);
    ahead->from += 64 * ahead->lines;
}

// Weights whose inputs are neighbours: the dot products of so many rows and outputs.
template <typename T, int ROWS, int OUTPUTS>
static void dot_tile(const pa_linear* p, int64_t row, int64_t column, next_lines ahead) {
    const T *x = (const T*)p->x + row * p->x_row, *w = (const T*)p->w + column * p->w_column;
    const int64_t x_row = p->x_row, w_column = p->w_column;
    lanes sums[ROWS][OUTPUTS] = {};
    int64_t k = 0;
    for (; k + LANES <= p->inner; k += LANES) {
        lanes left[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) left[r] = widened(x + r * x_row + k);
        fetch_ahead(&ahead);
#pragma GCC unroll 16
        for (int o = 0; o < OUTPUTS; o++) {
            const lanes right = widened(w + o * w_column + k);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) sums[r][o] = fused(left[r], right, sums[r][o]);
        }
    }
    if (k < p->inner)
#pragma GCC unroll 16
        for (int o = 0; o < OUTPUTS; o++) {
            const lanes right = widened_some(w + o * w_column + k, p->inner - k);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
                sums[r][o] = fused(widened_some(x + r * x_row + k, p->inner - k), right, sums[r][o]);
        }
    put_tile<T>(p, row, column, sums);
}

typedef void (*linear_tile)(const pa_linear*, int64_t, int64_t, next_lines);

// All rows, in panels of nearly equal height.
static inline void dot_rows(const pa_linear* p, const linear_tile* tiles, int64_t column, int64_t outputs, int64_t itemsize,
                            int64_t in_turn) {
    const int64_t panels = (p->rows + DOT_ROWS - 1) / DOT_ROWS, lines = (outputs + panels - 1) / panels;
    const char* from = (const char*)p->w + (column + 2 * outputs) * p->w_column * itemsize;
    for (int64_t panel = 0, row = 0; panel < panels; panel++) {
        const int64_t height = (p->rows - row + panels - panel - 1) / (panels - panel);
        tiles[height - 1](p, row, column, {from, lines});
        from += p->inner / in_turn * lines * 64;
        row += height;
    }
}

template <typename T, int OUTPUTS>
static const linear_tile* dot_tiles(void) {
    static const linear_tile found[] = {
        dot_tile<T, 1, OUTPUTS>, dot_tile<T, 2, OUTPUTS>,
#if defined(__AVX512F__)
        dot_tile<T, 3, OUTPUTS>, dot_tile<T, 4, OUTPUTS>, dot_tile<T, 5, OUTPUTS>, dot_tile<T, 6, OUTPUTS>,
#endif
    };
    return found;
}

// Weights whose outputs are neighbours: `ROWS` times `COUNT` vectors of outputs, over all inputs.
template <typename T, int ROWS, int COUNT>
static inline void wide_tile(const pa_linear* p, int64_t row, int64_t column) {
    const T *x = (const T*)p->x + row * p->x_row, *w = (const T*)p->w + column;
    const int64_t x_row = p->x_row, w_row = p->w_row;
    lanes sums[ROWS][COUNT] = {};
    for (int64_t k = 0; k < p->inner; k++, w += w_row) {
        lanes right[COUNT];
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; i++) {
            right[i] = widened(w + i * LANES);
            __builtin_prefetch(w + 16 * w_row + i * LANES, 0, 2);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const lanes left = widened_one(x + r * x_row + k) - (lanes){};
#pragma GCC unroll 16
            for (int i = 0; i < COUNT; i++) sums[r][i] = fused(left, right[i], sums[r][i]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; i++) put_outputs<T>(p, row + r, column + i * LANES, sums[r][i]);
}

template <typename T, int ROWS>
static inline void wide_some(const pa_linear* p, int64_t row, int64_t start, int64_t end) {
    enum { COUNT = ROWS == 1 ? WIDE_ALONE : WIDE };
    int64_t column = start;
    for (; column + COUNT * LANES <= end; column += COUNT * LANES) wide_tile<T, ROWS, COUNT>(p, row, column);
    for (; column + LANES <= end; column += LANES) wide_tile<T, ROWS, 1>(p, row, column);
    for (; column < end; column++)
        for (int r = 0; r < ROWS; r++) {
            // The same chain of multiply-adds as in a lane.
            lanes sum = {};
            for (int64_t k = 0; k < p->inner; k++)
                sum = fused(widened_one((const T*)p->x + (row + r) * p->x_row + k) - (lanes){},
                            widened_one((const T*)p->w + k * p->w_row + column) - (lanes){}, sum);
            put_output<T>(p, row + r, column, sum[0]);
        }
}

enum { ROW_COLUMNS = 2048 };

// One row alone reads weights in the order of memory. Sums are the same chains as those of tiles, but wait in a cache.
template <typename T>
static void row_alone(const pa_linear* p, int64_t start, int64_t end) {
    float sums[ROW_COLUMNS] = {};
    const T *x = (const T*)p->x, *w = (const T*)p->w + start;
    const int64_t count = end - start, whole = count / LANES * LANES;
    int64_t k = 0;
    for (; k + 4 <= p->inner; k += 4, w += 4 * p->w_row) {
        lanes left[4];
        for (int i = 0; i < 4; i++) left[i] = widened_one(x + k + i) - (lanes){};
        for (int64_t c = 0; c < whole; c += LANES) {
            lanes sum = lanes_at(sums + c);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                __builtin_prefetch(w + (i + 4) * p->w_row + c);
                sum = fused(left[i], widened(w + i * p->w_row + c), sum);
            }
            memcpy(sums + c, &sum, sizeof sum);
        }
        for (int64_t c = whole; c < count; c++)
            for (int i = 0; i < 4; i++)
                sums[c] = fused(left[i], widened_one(w + i * p->w_row + c) - (lanes){}, sums[c] - (lanes){})[0];
    }
    for (; k < p->inner; k++, w += p->w_row)
        for (int64_t c = 0; c < count; c++)
            sums[c] = fused(widened_one(x + k) - (lanes){}, widened_one(w + c) - (lanes){}, sums[c] - (lanes){})[0];
    int64_t c = 0;
    for (; c < whole; c += LANES) put_outputs<T>(p, 0, start + c, lanes_at(sums + c));
    for (; c < count; c++) put_output<T>(p, 0, start + c, sums[c]);
}

// One row alone reads weights in the order of memory, an output after the other: the processor fetches such a stream ahead
// by itself, and computes the next output's chain before this one ends. The chains are those of tiles.
template <typename T>
static void dots_alone(const pa_linear* p, int64_t start, int64_t end) {
    const T* const x = (const T*)p->x;
    for (int64_t column = start; column < end; column += 4) {
        const int64_t count = smaller(4, end - column);
        lanes sums[4] = {};
        for (int64_t o = 0; o < count; o++) {
            const T* const w = (const T*)p->w + (column + o) * p->w_column;
            lanes sum = {};
            int64_t k = 0;
            for (; k + LANES <= p->inner; k += LANES) sum = fused(widened(x + k), widened(w + k), sum);
            if (k < p->inner) sum = fused(widened_some(x + k, p->inner - k), widened_some(w + k, p->inner - k), sum);
            sums[o] = sum;
        }
        put_alone<T>(p, column, count, sums);
    }
}

template <typename T>
static void linear_columns(const pa_linear* p, int64_t start, int64_t end) {
    if (p->w_row == 1) {
        if (p->rows == 1) return dots_alone<T>(p, start, end);
        int64_t column = start;
        for (; column + 4 <= end; column += 4) dot_rows(p, dot_tiles<T, 4>(), column, 4, sizeof(T), LANES);
        for (; column < end; column++) dot_rows(p, dot_tiles<T, 1>(), column, 1, sizeof(T), LANES);
        return;
    }
    if (p->rows == 1) {
        for (int64_t column = start; column < end; column += ROW_COLUMNS)
            row_alone<T>(p, column, smaller(column + ROW_COLUMNS, end));
        return;
    }
    enum { BLOCK = 8 * WIDE * LANES };  // of weights that stay in the cache for all rows
    for (int64_t block = start; block < end; block += BLOCK) {
        const int64_t stop = smaller(block + BLOCK, end);
        int64_t row = 0;
        for (; row + WIDE_ROWS <= p->rows; row += WIDE_ROWS) wide_some<T, WIDE_ROWS>(p, row, block, stop);
        for (; row + 4 <= p->rows; row += 4) wide_some<T, 4>(p, row, block, stop);
        for (; row < p->rows; row++) wide_some<T, 1>(p, row, block, stop);
    }
}

#include "pairs.h"

static void linear_part(const pa_linear* p, int64_t start, int64_t end) {
    if (p->type == PA_FLOAT32) {
        linear_columns<float>(p, start, end);
        return;
    }
#if PA_HAS_PAIRS
    if (has_pairs()) {
        pairs_columns(p, start, end);
        return;
    }
#endif
    linear_columns<uint16_t>(p, start, end);
}
