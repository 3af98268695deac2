// Sums of squares in float64, and elementwise reductions of the types that are not computed in float32.
//
// [Note: Blocked summation]
// A piece is cut into blocks of SUM_BLOCK elements from its own start. In a block, element i goes to accumulator
// i % SUM_LANES; the accumulators, and then the blocks, are added in pairs. So a piece's sum depends on its contents only:
// not on its address, the number of threads or the instruction set. Squares of float32 are exact in float64.
#pragma once

#include "numbers.h"
#include "sweep.h"

enum { SUM_LANES = 16 };

typedef double doubles __attribute__((vector_size(64)));
typedef float floats __attribute__((vector_size(32)));

static inline void add_squares(doubles* total, const float* from) {
    floats low, high;
    memcpy(&low, from, sizeof low);
    memcpy(&high, from + 8, sizeof high);
    const doubles a = __builtin_convertvector(low, doubles), b = __builtin_convertvector(high, doubles);
    total[0] += a * a;
    total[1] += b * b;
}

static inline void add_squares(doubles* total, const double* from) {
    doubles a, b;
    memcpy(&a, from, sizeof a);
    memcpy(&b, from + 8, sizeof b);
    total[0] += a * a;
    total[1] += b * b;
}

template <typename T>
static void add_run(doubles* total, const T* from, int64_t numel) {
    int64_t i = 0;
    for (; i + SUM_LANES <= numel; i += SUM_LANES) add_squares(total, from + i);
    if (i < numel) {
        T padded[SUM_LANES] = {};
        memcpy(padded, from + i, (size_t)(numel - i) * sizeof *from);
        add_squares(total, padded);
    }
}

// The sum of squares of one block of at most SUM_BLOCK elements.
static double square_sum_block(const void* data, int32_t type, int64_t numel) {
    doubles total[2] = {};
    if (type == PA_FLOAT64)
        add_run(total, (const double*)data, numel);
    else if (type == PA_FLOAT32)
        add_run(total, (const float*)data, numel);
    else {
        alignas(64) float wide[SUM_BLOCK];
        widen(wide, data, type, numel);
        add_run(total, wide, numel);
    }
    const doubles sum = total[0] + total[1];
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

template <typename T>
static void combine_run(int32_t kind, T* __restrict target, const T* __restrict source, int64_t numel) {
    switch (kind) {  // outside the loops, so that each is vectorised for its kind
        case PA_SUM:
            for (int64_t i = 0; i < numel; i++) target[i] = combined<T>(PA_SUM, target[i], source[i]);
            return;
        case PA_PROD:
            for (int64_t i = 0; i < numel; i++) target[i] = combined<T>(PA_PROD, target[i], source[i]);
            return;
        case PA_MAX:
            for (int64_t i = 0; i < numel; i++) target[i] = combined<T>(PA_MAX, target[i], source[i]);
            return;
        default:
            for (int64_t i = 0; i < numel; i++) target[i] = combined<T>(PA_MIN, target[i], source[i]);
    }
}

// Sums and products wrap, which only unsigned arithmetic may; an order needs the sign.
template <typename Signed, typename Unsigned>
static void combine_integers(int32_t kind, void* target, const void* source, int64_t numel) {
    if (kind == PA_SUM || kind == PA_PROD)
        combine_run(kind, (Unsigned*)target, (const Unsigned*)source, numel);
    else
        combine_run(kind, (Signed*)target, (const Signed*)source, numel);
}

static void combine_any(int32_t kind, int32_t type, void* target, const void* source, int64_t numel) {
    switch (type) {
        case PA_FLOAT64: return combine_run(kind, (double*)target, (const double*)source, numel);
        case PA_INT64: return combine_integers<int64_t, uint64_t>(kind, target, source, numel);
        case PA_INT32: return combine_integers<int32_t, uint32_t>(kind, target, source, numel);
        case PA_INT16: return combine_integers<int16_t, uint16_t>(kind, target, source, numel);
        case PA_INT8: return combine_integers<int8_t, uint8_t>(kind, target, source, numel);
        default: return combine_run(kind, (uint8_t*)target, (const uint8_t*)source, numel);
    }
}
