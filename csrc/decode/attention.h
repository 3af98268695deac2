// Attention of one new token of each sequence over its cache of keys and values.
#pragma once

#include "linear.h"

// e to the power of `x` <= 0, to 2 units of the last place: a polynomial for what is left of a power of two.
static inline float power_of_e(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float whole = (float)(int32_t)(x * 1.44269504f - 0.5f);
    const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * float_of((uint32_t)((int32_t)whole + 127) << 23);
}

static inline float rounded_like(const float*, float value) { return value; }
static inline float rounded_like(const uint16_t*, float value) { return from_bfloat16(to_bfloat16(value)); }

// A head turned by its position, rounded after each operation as transformers does; `to` may be float or T.
template <typename T, typename To>
static inline void turned(const pa_attention* p, const T* from, int64_t position, To* to) {
    const T *cosine = (const T*)p->cosines + position * p->rotated, *sine = (const T*)p->sines + position * p->rotated;
    const int64_t half = p->rotated / 2;
    for (int64_t i = 0; i < p->rotated; i++) {
        const float other = i < half ? -widened_one(from + i + half) : widened_one(from + i - half);
        const float straight = rounded_like(from, widened_one(from + i) * widened_one(cosine + i));
        store_one(to + i, rounded_like(from, straight + rounded_like(from, other * widened_one(sine + i))));
    }
    for (int64_t i = p->rotated; i < p->head; i++) store_one(to + i, widened_one(from + i));
}

// The queries of one group of sequence `b`, which share a head of keys and values.
template <typename T>
static void attend_group(const pa_attention* p, int64_t b, int64_t h, float* scratch) {
    const int64_t position = p->positions[b], slot = p->slots[b], head = p->head;
    T *keys = (T*)p->keys + (slot * p->key_heads + h) * p->capacity * head;
    T *values = (T*)p->values + (slot * p->key_heads + h) * p->capacity * head;
    turned(p, (const T*)p->k + b * p->k_row + h * p->k_head, position, keys + position * head);
    memcpy(values + position * head, (const T*)p->v + b * p->v_row + h * p->v_head, sizeof(T) * (uint64_t)head);
    const int64_t count = position + 1, in_group = p->heads / p->key_heads;
    float *query = scratch, *scores = scratch + head;
    for (int64_t g = 0; g < in_group; g++) {
        const int64_t at = h * in_group + g;
        turned(p, (const T*)p->q + b * p->q_row + at * p->q_head, position, query);
        float most = -__builtin_inff();
        for (int64_t t = 0; t < count; t++) {
            const T* key = keys + t * head;
            lanes sum = {}, more = {};
            int64_t i = 0;
            for (; i + 2 * LANES <= head; i += 2 * LANES) {
                sum = fused(lanes_at(query + i), widened(key + i), sum);
                more = fused(lanes_at(query + i + LANES), widened(key + i + LANES), more);
            }
            float total = lanes_sum(sum + more);
            for (; i < head; i++) total += query[i] * widened_one(key + i);
            scores[t] = total * p->scale;
            if (scores[t] > most) most = scores[t];
        }
        float whole = 0;
        for (int64_t t = 0; t < count; t++) scores[t] = power_of_e(scores[t] - most);
        for (int64_t t = 0; t < count; t++) whole += scores[t];
        T* out = (T*)p->out + b * p->out_row + at * head;
        int64_t i = 0;
        for (; i + 2 * LANES <= head; i += 2 * LANES) {
            lanes left = {}, right = {};
            for (int64_t t = 0; t < count; t++) {
                const T* value = values + t * head + i;
                const lanes share = scores[t] - (lanes){};
                left = fused(share, widened(value), left);
                right = fused(share, widened(value + LANES), right);
            }
            for (int j = 0; j < LANES; j++) {
                store_one(out + i + j, left[j] / whole);
                store_one(out + i + LANES + j, right[j] / whole);
            }
        }
        for (; i < head; i++) {
            float total = 0;
            for (int64_t t = 0; t < count; t++) total += scores[t] * widened_one(values + t * head + i);
            store_one(out + i, total / whole);
        }
    }
}

static void attention_part(const pa_attention* p, int64_t b, int64_t h, float* scratch) {
    if (p->type == PA_FLOAT32)
        attend_group<float>(p, b, h, scratch);
    else
        attend_group<uint16_t>(p, b, h, scratch);
}
