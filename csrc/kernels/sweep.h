// One pass over memory for an update: 16-bit arrays are widened block by block into the first cache, float32 arrays are
// used where they lie, and `out` is written while the new weights are still in that cache.
#pragma once

#include "isa.h"
#include "numbers.h"
#include "updates.h"

static const int64_t SWEEP_BLOCK = 512;  // elements

static void widen(float* to, const void* from, int32_t type, int64_t numel) {
    if (type == PA_FLOAT32)
        memcpy(to, from, (size_t)numel * sizeof *to);
    else if (type == PA_BFLOAT16)
        widen_bfloat16(to, (const uint16_t*)from, numel);
    else
        widen_float16(to, (const uint16_t*)from, numel);
}

static void narrow(void* to, int32_t type, const float* from, int64_t numel) {
    if (type == PA_FLOAT32)
        memcpy(to, from, (size_t)numel * sizeof *from);
    else if (type == PA_BFLOAT16)
        narrow_bfloat16((uint16_t*)to, from, numel);
    else
        narrow_float16((uint16_t*)to, from, numel);
}

// Weights: with `rounding` stochastically, the first of them being element `at` of the buffer.
static void narrow_weights(void* to, int32_t type, const float* from, const pa_rounding* rounding, int64_t at,
                           int64_t numel) {
    if (!rounding || type == PA_FLOAT32) return narrow(to, type, from, numel);
    const uint32_t first = (uint32_t)(rounding->start + (uint64_t)at);
    if (type == PA_BFLOAT16)
        narrow_bfloat16_by(rounding, first, (uint16_t*)to, from, numel);
    else
        narrow_float16_by(rounding, first, (uint16_t*)to, from, numel);
}

// A sweep over bfloat16 alone; an odd last element is left. Returns where it ended.
static int64_t sweep_pairs(const update_row& row, const pa_array* arrays, const float* constants, int64_t start,
                           int64_t end) {
    bfloat16_pair* run[4];
    for (int32_t i = 0; i < 4; i++) run[i] = (bfloat16_pair*)((uint16_t*)arrays[i].data + start);
    const int64_t pairs = (end - start) / 2;
    row.run_pairs(run[0], run[1], run[2], run[3], constants, pairs);
    return start + 2 * pairs;
}

static void sweep(int32_t kind, const pa_array* arrays, pa_array out, const float* constants,
                  const pa_rounding* rounding, int64_t start, int64_t end) {
    update_row row = UPDATES[kind];
    int32_t of_type[PA_TYPE_COUNT] = {};
    for (int32_t i = 0; i < row.arrays; i++) of_type[arrays[i].type]++;
    if (row.run_pairs && of_type[PA_BFLOAT16] == row.arrays && !out.data && !rounding)
        start = sweep_pairs(row, arrays, constants, start, end);
    const bool reads_bfloat16 = row.run_bfloat16_gradient && arrays[1].type == PA_BFLOAT16;
    if (reads_bfloat16) row.run = row.run_bfloat16_gradient;
    const bool rounds_source = kind >= PA_SUM && kind <= PA_PROD && arrays[0].type != PA_FLOAT32 && arrays[1].type != arrays[0].type;
    alignas(64) float staged[PA_MOST_ARRAYS][SWEEP_BLOCK];
    alignas(64) uint16_t rounded[SWEEP_BLOCK];
    float* run[PA_MOST_ARRAYS] = {};
    // Between blocks a processor waits for the last division of one before it starts those of the next.
    const bool is_staged = out.data || of_type[PA_FLOAT32] + reads_bfloat16 < row.arrays;
    const int64_t block = is_staged ? SWEEP_BLOCK : end - start;
    for (int64_t at = start; at < end; at += block) {
        const int64_t numel = smaller(block, end - at);
        for (int32_t i = 0; i < row.arrays; i++) {
            char* const from = (char*)arrays[i].data + at * itemsize_of(arrays[i].type);
            const bool stays = i == 1 ? reads_bfloat16 || (arrays[i].type == PA_FLOAT32 && !rounds_source)
                                      : arrays[i].type == PA_FLOAT32;
            run[i] = stays ? (float*)from : staged[i];
            if (!stays && (row.reads >> i & 1)) widen(staged[i], from, arrays[i].type, numel);
        }
        if (rounds_source) {
            narrow(rounded, arrays[0].type, staged[1], numel);
            widen(staged[1], rounded, arrays[0].type, numel);
        }
        row.run(run, constants, numel);
        for (int32_t i = 0; i < row.arrays; i++)
            if (run[i] == staged[i] && (row.writes >> i & 1))
                narrow_weights((char*)arrays[i].data + at * itemsize_of(arrays[i].type), arrays[i].type, staged[i],
                               i == 0 ? rounding : nullptr, at, numel);
        if (out.data)
            narrow_weights((char*)out.data + at * itemsize_of(out.type), out.type, run[0], rounding, at, numel);
    }
}
