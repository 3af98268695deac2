// Quantisation by blocks that share a scale: int8 codes, or two 4-bit codes a byte.
#pragma once

#include "numbers.h"
#include "sweep.h"

// To nearest even for |x| < 2^22, without a library call: the sum has no room for a fraction.
static inline float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }

static float largest_magnitude(const float* __restrict from, int64_t numel) {
    // As integers: the order of magnitudes is that of their bits, and every NaN is above infinity.
    uint32_t largest = 0;
    for (int64_t i = 0; i < numel; i++) {
        const uint32_t magnitude = bits_of(from[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return float_of(largest);
}

static void quantize_run(float* __restrict values, int64_t numel, float scale, float most) {
    INDEPENDENT
    for (int64_t i = 0; i < numel; i++) {
        // Where the scale is subnormal it is coarse, and a quotient may pass the last code.
        const float code = nearest(values[i] / scale);
        values[i] = code > most ? most : code < -most ? -most : code;
    }
}

// Codes of elements [start, end), which lie in one block of that `scale`, from `source`.
static void quantize_part(int32_t bits, pa_array source, uint8_t* codes, float scale, int64_t start, int64_t end) {
    const bool is_usable = scale > 0 && scale <= 3.4028234663852886e38f;
    for (int64_t at = start; at < end; at += SWEEP_BLOCK) {
        alignas(64) float values[SWEEP_BLOCK + 1];
        const int64_t numel = smaller(SWEEP_BLOCK, end - at);
        if (is_usable) {
            widen(values, (char*)source.data + at * itemsize_of(source.type), source.type, numel);
            quantize_run(values, numel, scale, bits == 8 ? 127.0f : 7.0f);
        } else {
            memset(values, 0, sizeof values);
        }
        if (bits == 8) {
            uint8_t* const to = codes + at;
            INDEPENDENT
            for (int64_t i = 0; i < numel; i++) to[i] = (uint8_t)(int8_t)(int32_t)values[i];
        } else {
            values[numel] = 0;
            uint8_t* const to = codes + at / 2;
            INDEPENDENT
            for (int64_t i = 0; i < (numel + 1) / 2; i++)
                to[i] = (uint8_t)(((int32_t)values[2 * i] & 15) | ((int32_t)values[2 * i + 1] & 15) << 4);
        }
    }
}

static void quantize_block(int32_t bits, pa_array source, uint8_t* codes, float* scale, int64_t start, int64_t end) {
    float largest = 0;
    bool is_finite = true;
    for (int64_t at = start; at < end; at += SWEEP_BLOCK) {
        alignas(64) float values[SWEEP_BLOCK];
        const int64_t numel = smaller(SWEEP_BLOCK, end - at);
        widen(values, (char*)source.data + at * itemsize_of(source.type), source.type, numel);
        const float magnitude = largest_magnitude(values, numel);
        is_finite = is_finite && bits_of(magnitude) < 0x7f800000;
        largest = magnitude > largest ? magnitude : largest;
    }
    *scale = is_finite ? largest / (bits == 8 ? 127.0f : 7.0f) : float_of(0x7fc00000);
    quantize_part(bits, source, codes, *scale, start, end);
}

static void dequantize_block(int32_t bits, pa_array out, const uint8_t* codes, float scale, int64_t start,
                             int64_t end) {
    for (int64_t at = start; at < end; at += SWEEP_BLOCK) {
        alignas(64) float values[SWEEP_BLOCK + 1];
        const int64_t numel = smaller(SWEEP_BLOCK, end - at);
        if (bits == 8) {
            const uint8_t* const from = codes + at;
            INDEPENDENT
            for (int64_t i = 0; i < numel; i++) values[i] = (float)(int8_t)from[i] * scale;
        } else {
            for (int64_t i = 0; i < numel; i += 2) {
                const uint8_t pair = codes[(at + i) / 2];
                values[i] = (float)(((pair & 15) ^ 8) - 8) * scale;
                values[i + 1] = (float)(((pair >> 4) ^ 8) - 8) * scale;
            }
        }
        narrow((char*)out.data + at * itemsize_of(out.type), out.type, values, numel);
    }
}
