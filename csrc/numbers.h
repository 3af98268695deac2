// 16-bit floats as float32 and back, many at a time, with the same bits on every instruction set.
//
// To nearest even; subnormals are kept; NaN stays NaN, quiet, with the upper bits of its payload. (AVX512_BF16 has an
// instruction for this which flushes subnormals: it would tell machines apart and win nothing where memory is the limit.)
//
// Everything here is `static`: each instruction set compiles its own copy, and the linker must not choose among them.
#pragma once

#include <stdint.h>
#include <string.h>

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

static inline uint16_t to_bfloat16(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
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
