// Linear layers whose weights are integers of 8 or 4 bits, with a scale for each group of a row's inputs.
//
// [Note: Integers of a group]
// Inputs of a row become integers of 16 bits with a scale for each group: off by 1/65534 of the group's largest magnitude
// at most, about what float32 products lose by their order. The sum of a group is then exact, so neither the
// order nor the instruction set changes it. Groups are added up in float32, in their order. A row has the same bits alone
// and among others. A group with NaN or infinity makes its row NaN.
//
// [Note: Packed groups]
// Sixteen outputs lie together. For each group of them come the weights of four inputs at a time, in two pairs. With 8
// bits these are 32 signed bytes, the two inputs of each output, and 32 more for the second pair. With 4 bits the second
// pair has the upper halves of the same bytes, and 8 is added to each weight. Groups are filled with zeros up to a
// multiple of four, and outputs up to one of sixteen. The scales lie in the same order.
#pragma once

#include "linear.h"

enum { PACKED = 16, IN_UNIT = 4, VECTORS = PACKED / LANES, CHUNK_ROWS = 96, LARGEST_STEP = 32767, LARGEST_GROUP = 512 };
#if defined(__AVX512F__)
enum { GROUPED_ROWS = 16 };
#else
enum { GROUPED_ROWS = 4 };
#endif

typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef int16_t pairs __attribute__((vector_size(4 * LANES)));
typedef uint16_t unsigned_pairs __attribute__((vector_size(4 * LANES)));
typedef int8_t byte_pairs __attribute__((vector_size(2 * LANES)));
typedef uint8_t unsigned_byte_pairs __attribute__((vector_size(2 * LANES)));

static inline int64_t units_of(const pa_grouped* p) { return (p->group + IN_UNIT - 1) / IN_UNIT; }
static inline int64_t groups_of(const pa_grouped* p) { return (p->inner + p->group - 1) / p->group; }

// The two pairs of a unit for the outputs of vector `v`.
template <int BITS>
static inline __attribute__((always_inline)) void unit_at(const uint8_t* from, int v, ints (&found)[2]) {
    if (BITS == 8) {
        for (int i = 0; i < 2; i++) {
            byte_pairs some;
            memcpy(&some, from + (i * VECTORS + v) * sizeof some, sizeof some);
            found[i] = (ints)__builtin_convertvector(some, pairs);
        }
        return;
    }
    unsigned_byte_pairs some;
    memcpy(&some, from + v * sizeof some, sizeof some);
    const unsigned_pairs both = __builtin_convertvector(some, unsigned_pairs);
    found[0] = (ints)(both & 15);
    found[1] = (ints)(both >> 4);
}

// Adds to each sum the products of a pair of weights and a pair of inputs.
static inline ints pairs_multiplied(ints sum, ints left, ints right) {
#if defined(__AVX512F__)
    return (ints)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16((__m512i)left, (__m512i)right));
#elif defined(__AVX2__)
    return (ints)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)left, (__m256i)right));
#else
    return sum + (left << 16 >> 16) * (right << 16 >> 16) + (left >> 16) * (right >> 16);
#endif
}

#define GROUPED_TARGET
#define GROUPED(name) plain_##name
#define GROUPED_ADD pairs_multiplied
#include "grouped_tile.h"
#undef GROUPED_TARGET
#undef GROUPED
#undef GROUPED_ADD

#if defined(__AVX512F__)
#define GROUPED_TARGET __attribute__((target("avx512vnni")))
#define GROUPED(name) fused_##name
#define GROUPED_ADD(sum, left, right) (ints)_mm512_dpwssd_epi32((__m512i)(sum), (__m512i)(left), (__m512i)(right))
#include "grouped_tile.h"
#undef GROUPED_TARGET
#undef GROUPED
#undef GROUPED_ADD
#endif

// The integers and scales of a row, and the sum of each group's integers. Those of a group lie together for all rows: with
// rows apart by a power of two, a cache would hold eight of them.
template <typename T>
static inline void row_steps(const pa_grouped* p, const T* x, int64_t row) {
    const int64_t padded = units_of(p) * IN_UNIT, groups = groups_of(p);
    const float largest = (float)(padded <= LARGEST_GROUP ? (int64_t)LARGEST_STEP : (int64_t)LARGEST_STEP * LARGEST_GROUP / padded);
    for (int64_t g = 0; g < groups; g++) {
        int16_t* const steps = p->steps + (g * p->rows + row) * padded;
        const T* const from = x + g * p->group;
        const int64_t count = smaller(p->group, p->inner - g * p->group);
        uint32_t bits = 0;
        for (int64_t i = 0; i < count; i++) {
            const uint32_t mine = bits_of(widened_one(from + i)) & 0x7fffffff;
            bits = mine > bits ? mine : bits;
        }
        const float most = float_of(bits);
        const bool is_finite = bits < 0x7f800000;
        p->step_scales[g * p->rows + row] = is_finite ? most / largest : __builtin_nanf("");
        // Below this the inverse is infinite, and the group is zero next to every bias.
        const float inverse = is_finite && most > 1e-30f ? largest / most : 0.0f;
        int32_t sum = 0;
        for (int64_t i = 0; i < count; i++) {
            // The sum has the nearest integer in its last bits.
            const float step = is_finite ? widened_one(from + i) * inverse : 0.0f;
            const int32_t whole = (int32_t)(bits_of(step + 12582912.0f) - 0x4b400000u);
            steps[i] = (int16_t)whole;
            sum += whole;
        }
        for (int64_t i = count; i < padded; i++) steps[i] = 0;
        p->step_sums[g * p->rows + row] = sum;
    }
}

static void grouped_steps(const pa_grouped* p, int64_t row) {
    if (p->type == PA_FLOAT32)
        row_steps(p, (const float*)p->x + row * p->x_row, row);
    else
        row_steps(p, (const uint16_t*)p->x + row * p->x_row, row);
}

static void grouped_part(const pa_grouped* p, int64_t start, int64_t end) {
#if defined(__AVX512F__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni")) {
        fused_blocks(p, start, end);
        return;
    }
#endif
    plain_blocks(p, start, end);
}
