// Norms, activations and sums of rows, for steps in one call. Values are rounded where torch rounds them.
#pragma once

#include "attention.h"

static inline float silu(float x) {
    const float e = power_of_e(x < 0 ? x : -x);
    return x * ((x < 0 ? e : 1.0f) / (1.0f + e));
}

static inline float gelu_tanh(float x) {
    const float inner = 1.5957691216057308f * (x + 0.044715f * x * x * x);  // twice that of the tanh
    const float e = power_of_e(inner < 0 ? inner : -inner);
    return x * ((inner < 0 ? e : 1.0f) / (1.0f + e));  // x times the sigmoid, which is half of 1 + tanh
}

static inline float gelu(float x) { return 0.5f * x * (1.0f + __builtin_erff(x * 0.70710678118654752f)); }

static inline float relu(float x) { return x < 0 ? 0.0f : x; }

template <typename T, float (*FUNCTION)(float)>
static inline void activated(const pa_rowwise* p, const T* x, const T* other, T* y) {
    if (!other)
        for (int64_t i = 0; i < p->width; i++) store_one(y + i, FUNCTION(widened_one(x + i)));
    else
        for (int64_t i = 0; i < p->width; i++)
            store_one(y + i, rounded_like(x, FUNCTION(widened_one(x + i))) * widened_one(other + i));
}

// Sums of LANES chains, which are added in pairs.
template <typename T, typename F>
static inline float row_sum(const T* x, int64_t numel, F of) {
    lanes sum = {};
    int64_t i = 0;
    for (; i + LANES <= numel; i += LANES) sum += of(widened(x + i));
    float total = lanes_sum(sum);
    for (; i < numel; i++) total += of(widened_one(x + i) - (lanes){})[0];
    return total;
}

template <typename T>
static inline void normed(const pa_rowwise* p, const T* x, T* y) {
    const T *weight = (const T*)p->weight, *bias = (const T*)p->bias;
    const float numel = (float)p->width;
    if (p->kind == PA_RMS_NORM) {
        const float squares = row_sum(x, p->width, [](lanes v) __attribute__((always_inline)) { return v * v; });
        const float factor = 1.0f / __builtin_sqrtf(squares / numel + p->eps);
        for (int64_t i = 0; i < p->width; i++)
            store_one(y + i, widened_one(weight + i) * rounded_like(x, widened_one(x + i) * factor));
        return;
    }
    const float mean = row_sum(x, p->width, [](lanes v) __attribute__((always_inline)) { return v; }) / numel;
    const float squares = row_sum(x, p->width, [mean](lanes v) __attribute__((always_inline)) { return (v - mean) * (v - mean); });
    const float factor = 1.0f / __builtin_sqrtf(squares / numel + p->eps);
    for (int64_t i = 0; i < p->width; i++) {
        const float centred = (widened_one(x + i) - mean) * factor * (weight ? widened_one(weight + i) : 1.0f);
        store_one(y + i, centred + (bias ? widened_one(bias + i) : 0.0f));
    }
}

template <typename T>
static void rowwise_of(const pa_rowwise* p, int64_t row) {
    for (int64_t part = 0; part < p->per_row; part++) {
        const T* const x = (const T*)p->x + row * p->x_row + part * p->width;
        const T* const other = p->other ? (const T*)p->other + row * p->other_row + part * p->width : nullptr;
        T* const y = (T*)p->y + row * p->y_row + part * p->width;
        if (p->kind == PA_RMS_NORM || p->kind == PA_LAYER_NORM) normed(p, x, y);
        if (p->kind == PA_SILU) activated<T, silu>(p, x, other, y);
        if (p->kind == PA_GELU) activated<T, gelu>(p, x, other, y);
        if (p->kind == PA_GELU_TANH) activated<T, gelu_tanh>(p, x, other, y);
        if (p->kind == PA_RELU) activated<T, relu>(p, x, other, y);
        if (p->kind == PA_ADD)
            for (int64_t i = 0; i < p->width; i++) store_one(y + i, widened_one(x + i) + widened_one(other + i));
    }
}

static void rowwise_part(const pa_rowwise* p, int64_t row) {
    if (p->type == PA_FLOAT32)
        rowwise_of<float>(p, row);
    else
        rowwise_of<uint16_t>(p, row);
}
