// 16-bit floats as float32 and back, many at a time, with the same bits on every instruction set.
//
// Rounding is to nearest even; subnormals are kept; NaN becomes a quiet NaN with the upper bits of its payload.
// (AVX512_BF16 has an instruction for this, which flushes subnormals: results would differ between machines, and nothing
// would be won where memory is the limit.)
//
// Everything here is `static`: each instruction set compiles its own copy, and the linker must not choose among them.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float from_bfloat16(uint16_t half) { return float_of((uint32_t)half << 16); }

// In the upper half; what the lower one has does not matter.
static inline uint32_t rounded_to_bfloat16(float value) {
    const uint32_t bits = bits_of(value);
    return value != value ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1);
}

static inline uint16_t to_bfloat16(float value) { return (uint16_t)(rounded_to_bfloat16(value) >> 16); }

// Two neighbours in one word, by the halves where they lie. Widening and rounding them there needs no shuffle of a vector.
typedef uint32_t bfloat16_pair __attribute__((aligned(2), may_alias));

static inline float upper_of(uint32_t pair) { return float_of(pair & 0xffff0000); }

static inline float lower_of(uint32_t pair) { return float_of(pair << 16); }

static inline uint32_t pair_of(float upper, float lower) {
    return (rounded_to_bfloat16(upper) & 0xffff0000) | rounded_to_bfloat16(lower) >> 16;
}

static inline float from_float16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    const uint32_t normal = (rest << 13) + (112u << 23);
    const uint32_t special = (rest << 13) | 0x7f800000 | (rest > 0x7c00 ? 0x400000 : 0);
    // 0.5 has a spacing of 2^-24, the unit of subnormals: their bits below it are their value.
    const uint32_t subnormal = bits_of(float_of((126u << 23) | rest) - 0.5f);
    return float_of(sign | (rest >= 0x7c00 ? special : rest < 0x400 ? subnormal : normal));
}

static inline uint16_t to_float16(float value) {
    const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    const uint32_t normal = (rest + 0xfff + ((rest >> 13) & 1) - (112u << 23)) >> 13;
    const uint32_t special = 0x7c00 | (rest > 0x7f800000 ? 0x200 | ((rest >> 13) & 0x3ff) : 0);
    const uint32_t subnormal = bits_of(float_of(rest) + 0.5f) - (126u << 23);
    return (uint16_t)(sign | (rest >= 0x47800000 ? special : rest < 0x38800000 ? subnormal : normal));
}

// 32 random bits for an element, which depend on nothing else, so that nothing else matters for how it is rounded:
// `triple32` of C. Wellons' hash-prospector, a bijection found by search for the least bias, with the key mixed in before
// and between. polyaccel/ops/rounding.py has the same.
static inline uint32_t random_bits(uint32_t index, uint32_t key0, uint32_t key1) {
    uint32_t x = index ^ key0;
    x = (x ^ x >> 17) * 0xed5ad4bb + key1;
    x = (x ^ x >> 11) * 0xac4c1b51;
    x = (x ^ x >> 15) * 0x31848bab;
    return x ^ x >> 14;
}

// The neighbour below in magnitude, or above with the probability of the value's distance from there. What the type has
// is kept, and what lies beyond its largest number goes to nearest.
static inline uint16_t to_bfloat16_by(uint32_t random, float value) {
    const uint32_t bits = bits_of(value), rest = bits & 0x7fffffff;
    const uint32_t rounded = (bits + ((int32_t)rest > 0x7f7f0000 ? 0x8000 : random >> 16)) >> 16;
    return (uint16_t)((int32_t)rest > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

static inline uint16_t to_float16_by(uint32_t random, float value) {
    const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000;
    const int32_t rest = (int32_t)(bits & 0x7fffffff);
    const uint32_t normal = ((uint32_t)rest + (rest > 0x477fe000 ? 0x1000 : random >> 19) - (112u << 23)) >> 13;
    const uint32_t special = 0x7c00 | (rest > 0x7f800000 ? 0x200 | ((rest >> 13) & 0x3ff) : 0);
    // In units of 2^-24 with 21 binary places; the rest of a smaller number is cut off.
    const float small = rest < 0x38800000 ? float_of((uint32_t)rest) : 0.0f;
    const uint32_t subnormal = ((uint32_t)(int32_t)(small * 35184372088832.0f) + (random >> 11)) >> 21;
    return (uint16_t)(sign | (rest >= 0x47800000 ? special : rest < 0x38800000 ? subnormal : normal));
}

static void widen_bfloat16(float* __restrict to, const uint16_t* __restrict from, int64_t numel) {
    for (int64_t i = 0; i < numel; i++) to[i] = from_bfloat16(from[i]);
}

static void narrow_bfloat16(uint16_t* __restrict to, const float* __restrict from, int64_t numel) {
    for (int64_t i = 0; i < numel; i++) to[i] = to_bfloat16(from[i]);
}

static void widen_float16(float* __restrict to, const uint16_t* __restrict from, int64_t numel) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= numel; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
#endif
    for (; i < numel; i++) to[i] = from_float16(from[i]);
}

static void narrow_float16(uint16_t* __restrict to, const float* __restrict from, int64_t numel) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= numel; i += 8)
        _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < numel; i++) to[i] = to_float16(from[i]);
}

static void narrow_bfloat16_by(const pa_rounding* rounding, uint32_t first, uint16_t* __restrict to,
                               const float* __restrict from, int64_t numel) {
    const uint32_t key0 = rounding->key[0], key1 = rounding->key[1];
    for (int32_t i = 0; i < (int32_t)numel; i++) to[i] = to_bfloat16_by(random_bits(first + (uint32_t)i, key0, key1), from[i]);
}

static void narrow_float16_by(const pa_rounding* rounding, uint32_t first, uint16_t* __restrict to,
                              const float* __restrict from, int64_t numel) {
    const uint32_t key0 = rounding->key[0], key1 = rounding->key[1];
    for (int32_t i = 0; i < (int32_t)numel; i++) to[i] = to_float16_by(random_bits(first + (uint32_t)i, key0, key1), from[i]);
}
