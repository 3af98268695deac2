// Linear layers in bfloat16 by products of pairs (AVX512_BF16), where the processor has them: twice the speed of widened
// numbers. Subnormals count as zero. Included by linear.h.
#pragma once

#if defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 10)
#define PA_HAS_PAIRS 1
#define PA_PAIRS __attribute__((target("avx512bf16")))

static bool has_pairs(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16");
}

static inline __m512i pairs_some(const uint16_t* from, int64_t count) {
    return _mm512_maskz_loadu_epi16((__mmask32)((1u << count) - 1), from);
}

PA_PAIRS static inline lanes pairs_added(lanes sum, __m512i left, __m512i right) {
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
}

template <int ROWS, int OUTPUTS>
PA_PAIRS static void pairs_dot_tile(const pa_linear* p, int64_t row, int64_t column, next_lines ahead) {
    const uint16_t *x = (const uint16_t*)p->x + row * p->x_row, *w = (const uint16_t*)p->w + column * p->w_column;
    const int64_t x_row = p->x_row, w_column = p->w_column;
    lanes sums[ROWS][OUTPUTS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
        for (int o = 0; o < OUTPUTS; o++) sums[r][o] = (lanes){};
    int64_t k = 0;
    for (; k + 32 <= p->inner; k += 32) {
        __m512i left[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) left[r] = _mm512_loadu_si512(x + r * x_row + k);
        fetch_ahead(&ahead);
#pragma GCC unroll 16
        for (int o = 0; o < OUTPUTS; o++) {
            const __m512i right = _mm512_loadu_si512(w + o * w_column + k);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) sums[r][o] = pairs_added(sums[r][o], left[r], right);
        }
    }
    if (k < p->inner)
#pragma GCC unroll 16
        for (int o = 0; o < OUTPUTS; o++) {
            const __m512i right = pairs_some(w + o * w_column + k, p->inner - k);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
                sums[r][o] = pairs_added(sums[r][o], pairs_some(x + r * x_row + k, p->inner - k), right);
        }
    put_tile<uint16_t>(p, row, column, sums);
}

// See `dots_alone`.
PA_PAIRS static void pairs_dots_alone(const pa_linear* p, int64_t start, int64_t end) {
    const uint16_t* const x = (const uint16_t*)p->x;
    for (int64_t column = start; column < end; column += 4) {
        const int64_t count = smaller(4, end - column);
        lanes sums[4] = {};
        for (int64_t o = 0; o < count; o++) {
            const uint16_t* const w = (const uint16_t*)p->w + (column + o) * p->w_column;
            lanes sum = {};
            int64_t k = 0;
            for (; k + 32 <= p->inner; k += 32)
                sum = pairs_added(sum, _mm512_loadu_si512(x + k), _mm512_loadu_si512(w + k));
            if (k < p->inner) sum = pairs_added(sum, pairs_some(x + k, p->inner - k), pairs_some(w + k, p->inner - k));
            sums[o] = sum;
        }
        put_alone<uint16_t>(p, column, count, sums);
    }
}

template <int OUTPUTS>
static const linear_tile* pairs_dot_tiles(void) {
    static const linear_tile found[] = {
        pairs_dot_tile<1, OUTPUTS>, pairs_dot_tile<2, OUTPUTS>, pairs_dot_tile<3, OUTPUTS>,
        pairs_dot_tile<4, OUTPUTS>, pairs_dot_tile<5, OUTPUTS>, pairs_dot_tile<6, OUTPUTS>,
    };
    return found;
}

// Pairs of two rows of 32 weights: lanes hold the columns that `in_order` puts in order.
PA_PAIRS static inline void pairs_of_rows(const uint16_t* w, int64_t w_row, bool is_whole, __m512i (&pairs)[2]) {
    const __m512i first = _mm512_loadu_si512(w);
    const __m512i second = is_whole ? _mm512_loadu_si512(w + w_row) : _mm512_setzero_si512();
    pairs[0] = _mm512_unpacklo_epi16(first, second);
    pairs[1] = _mm512_unpackhi_epi16(first, second);
}

PA_PAIRS static inline void put_in_order(const pa_linear* p, int64_t row, int64_t column, __m512 left, __m512 right) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    put_outputs<uint16_t>(p, row, column, (lanes)_mm512_permutex2var_ps(left, low, right));
    put_outputs<uint16_t>(p, row, column + 16, (lanes)_mm512_permutex2var_ps(left, high, right));
}

static inline __m512i pair_of_inputs(const uint16_t* x, bool is_whole) {
    return _mm512_set1_epi32((int32_t)(x[0] | (is_whole ? (uint32_t)x[1] << 16 : 0)));
}

// `ROWS` times 32 * COUNT outputs. Two rows of weights are interleaved to pairs, whose sums are put in order at the end.
template <int ROWS, int COUNT>
PA_PAIRS static void pairs_wide_tile(const pa_linear* p, int64_t row, int64_t column) {
    const uint16_t *x = (const uint16_t*)p->x + row * p->x_row, *w = (const uint16_t*)p->w + column;
    const int64_t x_row = p->x_row, w_row = p->w_row;
    __m512 sums[ROWS][2 * COUNT];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
        for (int i = 0; i < 2 * COUNT; i++) sums[r][i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < p->inner; k += 2, w += 2 * w_row) {
        const bool is_whole = k + 1 < p->inner;
        __m512i right[COUNT][2];
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; i++) {
            __builtin_prefetch(w + 16 * w_row + 32 * i);
            __builtin_prefetch(w + 17 * w_row + 32 * i);
            pairs_of_rows(w + 32 * i, w_row, is_whole, right[i]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const __m512i left = pair_of_inputs(x + r * x_row + k, is_whole);
#pragma GCC unroll 16
            for (int i = 0; i < 2 * COUNT; i++) sums[r][i] = _mm512_dpbf16_ps(sums[r][i], (__m512bh)left, (__m512bh)right[i / 2][i % 2]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; i++) put_in_order(p, row + r, column + 32 * i, sums[r][2 * i], sums[r][2 * i + 1]);
}

// COUNT pairs of inputs from `k` on, times so many columns of weights, added to their sums.
template <int COUNT>
PA_PAIRS static inline void pairs_added_to(const pa_linear* p, int64_t k, int64_t start, int64_t columns, float* sums) {
    const uint16_t *x = (const uint16_t*)p->x + k, *w = (const uint16_t*)p->w + k * p->w_row + start;
    const bool is_whole = k + 2 * COUNT <= p->inner;  // or the last pair lacks its second
    __m512i left[COUNT];
    for (int i = 0; i < COUNT; i++) left[i] = pair_of_inputs(x + 2 * i, is_whole || i + 1 < COUNT);
    for (int64_t c = 0; c < columns; c += 32) {
        __m512 first = _mm512_load_ps(sums + c), second = _mm512_load_ps(sums + c + 16);
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++) {
            __m512i right[2];
            pairs_of_rows(w + 2 * i * p->w_row + c, p->w_row, is_whole || i + 1 < COUNT, right);
            first = _mm512_dpbf16_ps(first, (__m512bh)left[i], (__m512bh)right[0]);
            second = _mm512_dpbf16_ps(second, (__m512bh)left[i], (__m512bh)right[1]);
        }
        _mm512_store_ps(sums + c, first);
        _mm512_store_ps(sums + c + 16, second);
    }
}

// See `row_alone`: the same for multiples of 32 columns.
PA_PAIRS static void pairs_row_alone(const pa_linear* p, int64_t start, int64_t end) {
    alignas(64) float sums[ROW_COLUMNS] = {};
    int64_t k = 0;
    for (; k + 8 <= p->inner; k += 8) pairs_added_to<4>(p, k, start, end - start, sums);
    for (; k < p->inner; k += 2) pairs_added_to<1>(p, k, start, end - start, sums);
    for (int64_t c = 0; c < end - start; c += 32)
        put_in_order(p, 0, start + c, _mm512_load_ps(sums + c), _mm512_load_ps(sums + c + 16));
}

template <int ROWS>
static void pairs_wide_some(const pa_linear* p, int64_t row, int64_t start, int64_t end) {
    int64_t column = start;
    if (ROWS == 1 && p->rows == 1) {
        for (int64_t count; (count = smaller(ROW_COLUMNS, (end - column) / 32 * 32)) > 0; column += count)
            pairs_row_alone(p, column, column + count);
    }
    for (; column + 32 <= end; column += 32) pairs_wide_tile<ROWS, 1>(p, row, column);
    if (column == end) return;
    // What is left at the edge is computed with widened numbers.
    pa_linear rest = *p;
    rest.rows = ROWS;
    rest.x = (const uint16_t*)p->x + row * p->x_row;
    rest.y = (uint16_t*)p->y + row * p->y_row;
    linear_columns<uint16_t>(&rest, column, end);
}

static void pairs_columns(const pa_linear* p, int64_t start, int64_t end) {
    if (p->w_row == 1) {
        if (p->rows == 1) return pairs_dots_alone(p, start, end);
        int64_t column = start;
        for (; column + 4 <= end; column += 4) dot_rows(p, pairs_dot_tiles<4>(), column, 4, 2, 32);
        for (; column < end; column++) dot_rows(p, pairs_dot_tiles<1>(), column, 1, 2, 32);
        return;
    }
    if (p->rows == 1) return pairs_wide_some<1>(p, 0, start, end);
    enum { BLOCK = 512 };  // of weights that stay in the cache for all rows
    for (int64_t block = start; block < end; block += BLOCK) {
        const int64_t stop = smaller(block + BLOCK, end);
        int64_t row = 0;
        for (; row + 8 <= p->rows; row += 8) pairs_wide_some<8>(p, row, block, stop);
        for (; row + 4 <= p->rows; row += 4) pairs_wide_some<4>(p, row, block, stop);
        for (; row < p->rows; row++) pairs_wide_some<1>(p, row, block, stop);
    }
}
#else
#define PA_HAS_PAIRS 0
#endif
