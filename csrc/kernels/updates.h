// The loops of the updates, over runs of float32 that may lie anywhere.
//
// [Note: One rounding per operation]
// Every operation here is one of IEEE's correctly rounded ones and none is fused (-ffp-contract=off), in the order of
// polyaccel/ops/optimizers.py. Hence a value is the same bits in a vector and in a scalar tail, on every instruction
// set, however the buffer is cut and shared out, and the same as numpy's. The compiler vectorises these loops; with
// memory as the limit the missing fused multiply-adds cost nothing.
#pragma once

#include "kernels.h"
#include "numbers.h"

// Tells the compiler that the arrays of the following loop do not overlap. (GCC heeds __restrict on parameters only, and gives up on
// checking five arrays against each other.)
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

typedef void (*update_fn)(float* const* arrays, const float* k, int64_t numel);

static inline float averaged(float g, float average, const float* k) { return average * k[0] + g * k[1]; }

static inline float averaged_square(float g, float square, const float* k) { return square * k[2] + g * g * k[3]; }

static inline float direction_of(float average, float square, const float* k) {
    return average * k[4] / (__builtin_sqrtf(square) * k[5] + k[6]);
}

static inline float widened(float value) { return value; }

static inline float widened(uint16_t value) { return from_bfloat16(value); }

// [Note: Loads before stores]
// Adam's loops read all arrays of an element before they write any: written as they were computed, the same values took
// 8 % longer. (The likely cause: large buffers start at multiples of a page, so element i of each has the same lower
// bits of its address, and a processor that compares only those takes a read for one of what was just written.)
template <bool decoupled>
static inline void adam_element(float* p, float g, float* m, float* v, const float* k) {
    const float x = decoupled ? g * k[9] : g * k[9] + *p * k[8];
    const float kept = decoupled ? *p * k[8] : *p;
    *m = averaged(x, *m, k);
    *v = averaged_square(x, *v, k);
    *p = kept - direction_of(*m, *v, k) * k[7];
}

// `Gradient` is float, or uint16_t for the bits of bfloat16: Adam waits for its division and square root, and meanwhile
// widening a 16-bit gradient costs nothing.
template <bool decoupled, typename Gradient>
static void adam_loop(float* p, const Gradient* g, float* m, float* v, const float* constants, int64_t numel) {
    float k[10];
    memcpy(k, constants, sizeof k);
    INDEPENDENT
    for (int64_t i = 0; i < numel; i++) {
        float master = p[i], average = m[i], square = v[i];
        adam_element<decoupled>(&master, widened(g[i]), &average, &square, k);
        m[i] = average;
        v[i] = square;
        p[i] = master;
    }
}

// master, gradient, average, average of squares. Constants: beta1, 1 - beta1, beta2, 1 - beta2, 1 / correction1,
// 1 / sqrt(correction2), eps, learning rate, weight decay (decoupled: 1 - rate * decay), gradient scale.
template <bool decoupled>
static void adam(float* const* arrays, const float* k, int64_t numel) {
    adam_loop<decoupled>(arrays[0], arrays[1], arrays[2], arrays[3], k, numel);
}

// The same with a bfloat16 gradient, which array 1 points at.
template <bool decoupled>
static void adam_bfloat16(float* const* arrays, const float* k, int64_t numel) {
    adam_loop<decoupled>(arrays[0], (const uint16_t*)arrays[1], arrays[2], arrays[3], k, numel);
}

// The same where everything is bfloat16, two elements at a time.
template <bool decoupled>
static void adam_pairs(bfloat16_pair* p, const bfloat16_pair* g, bfloat16_pair* m, bfloat16_pair* v,
                       const float* constants, int64_t pairs) {
    float k[10];
    memcpy(k, constants, sizeof k);
    INDEPENDENT
    for (int64_t i = 0; i < pairs; i++) {
        float master0 = upper_of(p[i]), average0 = upper_of(m[i]), square0 = upper_of(v[i]);
        float master1 = lower_of(p[i]), average1 = lower_of(m[i]), square1 = lower_of(v[i]);
        adam_element<decoupled>(&master0, upper_of(g[i]), &average0, &square0, k);
        adam_element<decoupled>(&master1, lower_of(g[i]), &average1, &square1, k);
        m[i] = pair_of(average0, average1);
        v[i] = pair_of(square0, square1);
        p[i] = pair_of(master0, master1);
    }
}

// master, gradient. Constants: rate, momentum, 1 - dampening, weight decay, whether it is the first step, gradient scale.
static void sgd(float* const* arrays, const float* k, int64_t numel) {
    float* p = arrays[0];
    const float* g = arrays[1];
    INDEPENDENT
    for (int64_t i = 0; i < numel; i++) {
        const float x = g[i] * k[5] + p[i] * k[3];
        p[i] = p[i] - x * k[0];
    }
}

template <bool first, bool nesterov>
static void momentum_loop(float* const* arrays, const float* k, int64_t numel) {
    float *p = arrays[0], *average = arrays[2];
    const float* g = arrays[1];
    INDEPENDENT
    for (int64_t i = 0; i < numel; i++) {
        const float x = g[i] * k[5] + p[i] * k[3], a = first ? x : average[i] * k[1] + x * k[2];
        average[i] = a;
        p[i] = p[i] - (nesterov ? x + a * k[1] : a) * k[0];
    }
}

// master, gradient, momentum. Constants as those of sgd.
template <bool nesterov>
static void momentum(float* const* arrays, const float* k, int64_t numel) {
    (k[4] != 0 ? momentum_loop<true, nesterov> : momentum_loop<false, nesterov>)(arrays, k, numel);
}

// master, gradient, sum of squares. Constants: rate of this step, eps, weight decay, gradient scale.
static void adagrad(float* const* arrays, const float* k, int64_t numel) {
    float *p = arrays[0], *total = arrays[2];
    const float* g = arrays[1];
    INDEPENDENT
    for (int64_t i = 0; i < numel; i++) {
        const float x = g[i] * k[3] + p[i] * k[2], t = total[i] + x * x;
        total[i] = t;
        p[i] = p[i] - x * k[0] / (__builtin_sqrtf(t) + k[1]);
    }
}

// master, gradient, average, largest magnitude. Constants: beta1, 1 - beta1, beta2, rate of this step, eps, weight decay,
// gradient scale.
static void adamax(float* const* arrays, const float* k, int64_t numel) {
    float *p = arrays[0], *average = arrays[2], *largest = arrays[3];
    const float* g = arrays[1];
    INDEPENDENT
    for (int64_t i = 0; i < numel; i++) {
        const float x = g[i] * k[6] + p[i] * k[5], m = average[i] * k[0] + x * k[1];
        const float kept = largest[i] * k[2], magnitude = __builtin_fabsf(x) + k[4];
        const float most = kept > magnitude || kept != kept ? kept : magnitude;  // NaN wins
        average[i] = m;
        largest[i] = most;
        p[i] = p[i] - m * k[3] / most;
    }
}

// master, gradient, average. Constants: beta1, 1 - beta1, beta2, 1 - beta2, rate, 1 - rate * decay, gradient scale.
static void lion(float* const* arrays, const float* k, int64_t numel) {
    float *p = arrays[0], *average = arrays[2];
    const float* g = arrays[1];
    INDEPENDENT
    for (int64_t i = 0; i < numel; i++) {
        const float x = g[i] * k[6], blend = average[i] * k[0] + x * k[1];
        const float sign = blend > 0 ? 1.0f : blend < 0 ? -1.0f : blend;  // of NaN: NaN
        p[i] = p[i] * k[5] - sign * k[4];
        average[i] = average[i] * k[2] + x * k[3];
    }
}

// master, gradient, average, average of squares, direction. Constants as Adam's without decoupling.
static void lamb(float* const* arrays, const float* k, int64_t numel) {
    float *m = arrays[2], *v = arrays[3], *direction = arrays[4];
    const float *p = arrays[0], *g = arrays[1];
    INDEPENDENT
    for (int64_t i = 0; i < numel; i++) {
        const float x = g[i] * k[9];
        m[i] = averaged(x, m[i], k);
        v[i] = averaged_square(x, v[i], k);
        direction[i] = direction_of(m[i], v[i], k) + p[i] * k[8];
    }
}

// master, direction. Constants: rate, factor of the direction.
static void apply(float* const* arrays, const float* k, int64_t numel) {
    float* p = arrays[0];
    const float* direction = arrays[1];
    INDEPENDENT
    for (int64_t i = 0; i < numel; i++) p[i] = p[i] - direction[i] * k[1] * k[0];
}

// target. Constant: factor.
static void scale(float* const* arrays, const float* k, int64_t numel) {
    float* target = arrays[0];
    INDEPENDENT
    for (int64_t i = 0; i < numel; i++) target[i] = target[i] * k[0];
}

// source, which `out` takes as it is.
static void cast(float* const*, const float*, int64_t) {}

template <typename T>
static inline T product(T a, T b) {
    return a * b;
}

// Would be multiplied as int, which must not overflow.
static inline uint16_t product(uint16_t a, uint16_t b) { return (uint16_t)((uint32_t)a * b); }

template <typename T>
static inline T combined(int32_t kind, T a, T b) {
    switch (kind) {
        case PA_SUM: return a + b;
        case PA_PROD: return product(a, b);
        case PA_MAX: return a > b || a != a ? a : b;  // NaN wins
        default: return a < b || a != a ? a : b;
    }
}

// target, source.
template <int32_t kind>
static void combine(float* const* arrays, const float*, int64_t numel) {
    float* target = arrays[0];
    const float* source = arrays[1];
    INDEPENDENT
    for (int64_t i = 0; i < numel; i++) target[i] = combined(kind, target[i], source[i]);
}

// An update's name in polyaccel.ops, its arrays, and which of them (bit i: array i) it reads and writes. It may have its
// own forms for bfloat16 gradients, and for bfloat16 everywhere.
typedef struct {
    const char* name;
    update_fn run;
    int32_t arrays, constants;
    uint32_t reads, writes;
    update_fn run_bfloat16_gradient;
    void (*run_pairs)(bfloat16_pair* p, const bfloat16_pair* g, bfloat16_pair* m, bfloat16_pair* v,
                      const float* constants, int64_t pairs);
} update_row;

static const update_row UPDATES[] = {
    {"scale", scale, 1, 1, 1, 1, nullptr, nullptr},
    {"cast", cast, 1, 0, 1, 0, nullptr, nullptr},
    {"sum", combine<PA_SUM>, 2, 0, 3, 1, nullptr, nullptr},
    {"max", combine<PA_MAX>, 2, 0, 3, 1, nullptr, nullptr},
    {"min", combine<PA_MIN>, 2, 0, 3, 1, nullptr, nullptr},
    {"prod", combine<PA_PROD>, 2, 0, 3, 1, nullptr, nullptr},
    {"adamw", adam<true>, 4, 10, 15, 13, adam_bfloat16<true>, adam_pairs<true>},
    {"adam", adam<false>, 4, 10, 15, 13, adam_bfloat16<false>, adam_pairs<false>},
    {"sgd", sgd, 2, 6, 3, 1, nullptr, nullptr},
    {"momentum", momentum<false>, 3, 6, 7, 5, nullptr, nullptr},
    {"nesterov", momentum<true>, 3, 6, 7, 5, nullptr, nullptr},
    {"adagrad", adagrad, 3, 4, 7, 5, nullptr, nullptr},
    {"adamax", adamax, 4, 7, 15, 13, nullptr, nullptr},
    {"lion", lion, 3, 7, 7, 5, nullptr, nullptr},
    {"lamb", lamb, 5, 10, 15, 28, nullptr, nullptr},
    {"apply", apply, 2, 2, 3, 1, nullptr, nullptr},
};

static pa_shape shape(int32_t kind) {
    if (kind < 0 || kind >= (int32_t)(sizeof UPDATES / sizeof *UPDATES)) return {nullptr, 0, 0};
    return {UPDATES[kind].name, UPDATES[kind].arrays, UPDATES[kind].constants};
}
