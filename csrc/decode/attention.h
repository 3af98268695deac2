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

// [Note: Pages of keys and values]
// Keys and values lie in pages of `page` tokens, which a sequence gets as it grows; a page holds those of all layers. A
// row of the table `pages` has the addresses of a sequence's pages. In a page a layer has its keys from element `keys` on,
// (key heads, page, head), and its values from `values` on. The order of sums does not depend on the size of pages.
template <typename T>
static inline T* in_page(const pa_attention* p, int64_t slot, int64_t page, int64_t layer, int64_t h) {
    return (T*)p->pages[slot * p->pages_row + page] + layer + h * p->page * p->head;
}

// The products of a query, which is filled up with zeros to whole lanes, and of up to four keys.
template <typename T>
static inline void score_some(const float* query, const T* keys, int64_t head, int64_t count, float scale, float* scores) {
    lanes sums[4] = {};
    int64_t i = 0;
    for (; i + LANES <= head; i += LANES) {
        const lanes left = lanes_at(query + i);
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++)
            if (t < count) sums[t] = fused(left, widened(keys + t * head + i), sums[t]);
    }
    if (i < head)
        for (int64_t t = 0; t < count; t++)
            sums[t] = fused(lanes_at(query + i), widened_some(keys + t * head + i, head - i), sums[t]);
    const four found = lanes_sums(sums[0], sums[1], sums[2], sums[3]);
    for (int64_t t = 0; t < count; t++) scores[t] = found[t] * scale;
}

// COUNT vectors of a head's output from element `i` on: the shares of all tokens times their values.
template <typename T, int COUNT>
static inline void mix_some(const pa_attention* p, int64_t slot, int64_t h, int64_t i, const float* shares, int64_t count,
                            float whole, T* out) {
    lanes sums[COUNT] = {};
    for (int64_t first = 0, page = 0; first < count; first += p->page, page++) {
        const T* value = in_page<T>(p, slot, page, p->values, h) + i;
        const int64_t last = smaller(first + p->page, count);
        const T* const next = h + 1 < p->key_heads ? in_page<T>(p, slot, page, p->keys, h + 1) : value;
        for (int64_t t = first; t < last; t++, value += p->head) {
            const lanes share = shares[t] - (lanes){};
            for (int line = 0; line < COUNT * LANES * (int)sizeof(T); line += 64)
                __builtin_prefetch((const char*)(next + (t - first) * p->head + i) + line, 0, 2);
#pragma GCC unroll 4
            for (int c = 0; c < COUNT; c++) sums[c] = fused(share, widened(value + c * LANES), sums[c]);
        }
    }
    for (int c = 0; c < COUNT; c++)
        for (int j = 0; j < LANES; j++) store_one(out + i + c * LANES + j, sums[c][j] / whole);
}

// The elements of a head that fill no vector.
template <typename T>
static inline void mix_rest(const pa_attention* p, int64_t slot, int64_t h, int64_t i, const float* shares, int64_t count,
                            float whole, T* out) {
    lanes sum = {};
    for (int64_t t = 0; t < count; t++) {
        const T* const value = in_page<T>(p, slot, t / p->page, p->values, h) + t % p->page * p->head + i;
        sum = fused(shares[t] - (lanes){}, widened_some(value, p->head - i), sum);
    }
    for (int64_t j = 0; i + j < p->head; j++) store_one(out + i + j, sum[j] / whole);
}

// The powers of scores below the largest one, and their sum.
static inline float powers_of(float* scores, int64_t count) {
    float most = -__builtin_inff(), whole = 0;
    for (int64_t t = 0; t < count; t++) most = scores[t] > most ? scores[t] : most;
    for (int64_t t = 0; t < count; t++) scores[t] = power_of_e(scores[t] - most);
    for (int64_t t = 0; t < count; t++) whole += scores[t];
    return whole;
}

// The queries of one group of sequence `b`, which share a head of keys and values.
template <typename T>
static void attend_group(const pa_attention* p, int64_t b, int64_t h, float* scratch) {
    const int64_t position = p->positions[b], slot = p->slots[b], head = p->head, at_page = position % p->page * head;
    const int64_t count = position + 1, in_group = p->heads / p->key_heads, padded = (head + LANES - 1) / LANES * LANES;
    turned(p, (const T*)p->k + b * p->k_row + h * p->k_head, position,
           in_page<T>(p, slot, position / p->page, p->keys, h) + at_page);
    memcpy(in_page<T>(p, slot, position / p->page, p->values, h) + at_page, (const T*)p->v + b * p->v_row + h * p->v_head,
           sizeof(T) * (uint64_t)head);
    float *query = scratch, *scores = scratch + padded;
    memset(query + padded - LANES, 0, sizeof(lanes));
    for (int64_t g = 0; g < in_group; g++) {
        const int64_t at = h * in_group + g;
        turned(p, (const T*)p->q + b * p->q_row + at * p->q_head, position, query);
        for (int64_t first = 0, page = 0; first < count; first += p->page, page++) {
            const T *key = in_page<T>(p, slot, page, p->keys, h), *value = in_page<T>(p, slot, page, p->values, h);
            const int64_t last = smaller(first + p->page, count);
            for (int64_t t = first; t < last; t += 4, key += 4 * head, value += 4 * head) {
                for (int64_t line = 0; line < 4 * head * (int64_t)sizeof(T); line += 64) __builtin_prefetch((const char*)value + line, 0, 2);
                score_some(query, key, head, smaller(4, last - t), p->scale, scores + t);
            }
        }
        const float whole = powers_of(scores, count);
        T* const out = (T*)p->out + b * p->out_row + at * head;
        int64_t i = 0;
        for (; i + 4 * LANES <= head; i += 4 * LANES) mix_some<T, 4>(p, slot, h, i, scores, count, whole, out);
        for (; i + LANES <= head; i += LANES) mix_some<T, 1>(p, slot, h, i, scores, count, whole, out);
        if (i < head) mix_rest<T>(p, slot, h, i, scores, count, whole, out);
    }
}

static void attention_part(const pa_attention* p, int64_t b, int64_t h, float* scratch) {
    if (p->type == PA_FLOAT32)
        attend_group<float>(p, b, h, scratch);
    else
        attend_group<uint16_t>(p, b, h, scratch);
}
