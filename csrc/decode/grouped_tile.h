// Products of grouped weights, once for each way to add products of pairs. Included by grouped.h, which defines GROUPED
// (names), GROUPED_TARGET (an attribute of functions) and GROUPED_ADD.

template <int ROWS, int BITS>
GROUPED_TARGET static void GROUPED(tile)(const pa_grouped* p, int64_t row, int64_t block) {
    // Chains of sums, so that an addition need not wait for the one before.
    enum { CHAINS = ROWS == 1 ? 4 : ROWS <= 4 ? 2 : 1, UNITS = CHAINS == 4 ? 2 : 1, NBYTES = PACKED * IN_UNIT * BITS / 8 };
    const int64_t units = units_of(p), groups = groups_of(p), numel = units * IN_UNIT;
    const uint8_t* codes = p->codes + block * groups * units * NBYTES;
    const float* scales = p->scales + block * groups * PACKED;
    lanes totals[ROWS][VECTORS] = {};
    for (int64_t g = 0; g < groups; g++, scales += PACKED) {
        const int64_t at = g * p->rows + row;
        const int16_t* steps = p->steps + at * numel;
        ints sums[CHAINS][ROWS][VECTORS] = {};
        if (BITS == 4)
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) sums[0][r][v] = -8 * p->step_sums[at + r] - (ints){};
        int64_t u = 0;
        for (; u + UNITS <= units; u += UNITS, codes += UNITS * NBYTES, steps += UNITS * IN_UNIT) {
            __builtin_prefetch(codes + 1024);
            if (UNITS * NBYTES > 64) __builtin_prefetch(codes + 1024 + 64);
#pragma GCC unroll 2
            for (int j = 0; j < UNITS; j++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    ints weights[2];
                    unit_at<BITS>(codes + j * NBYTES, v, weights);
#pragma GCC unroll 2
                    for (int i = 0; i < 2; i++)
#pragma GCC unroll 16
                        for (int r = 0; r < ROWS; r++) {
                            int32_t pair;
                            memcpy(&pair, steps + r * numel + j * IN_UNIT + 2 * i, sizeof pair);
                            ints* const sum = &sums[(2 * j + i) % CHAINS][r][v];
                            *sum = GROUPED_ADD(*sum, weights[i], pair - (ints){});
                        }
                }
        }
        for (; u < units; u++, codes += NBYTES, steps += IN_UNIT)
            for (int v = 0; v < VECTORS; v++) {
                ints weights[2];
                unit_at<BITS>(codes, v, weights);
                for (int i = 0; i < 2; i++)
                    for (int r = 0; r < ROWS; r++) {
                        int32_t pair;
                        memcpy(&pair, steps + r * numel + 2 * i, sizeof pair);
                        sums[0][r][v] = GROUPED_ADD(sums[0][r][v], weights[i], pair - (ints){});
                    }
            }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                ints sum = sums[0][r][v];
#pragma GCC unroll 4
                for (int c = 1; c < CHAINS; c++) sum += sums[c][r][v];
                const lanes scale = lanes_at(scales + v * LANES) * p->step_scales[at + r];
                totals[r][v] = fused(__builtin_convertvector(sum, lanes), scale, totals[r][v]);
            }
    }
    const int64_t first = block * PACKED, count = smaller(PACKED, p->columns - first);
    for (int r = 0; r < ROWS; r++) {
        float found[PACKED];
        memcpy(found, totals[r], sizeof found);
        for (int64_t c = 0; c < count; c++) {
            if (p->type == PA_FLOAT32) {
                const float bias = p->bias ? ((const float*)p->bias)[first + c] : 0.0f;
                ((float*)p->y)[(row + r) * p->y_row + first + c] = found[c] + bias;
            } else {
                const float bias = p->bias ? from_bfloat16(((const uint16_t*)p->bias)[first + c]) : 0.0f;
                ((uint16_t*)p->y)[(row + r) * p->y_row + first + c] = to_bfloat16(found[c] + bias);
            }
        }
    }
}

template <int BITS>
GROUPED_TARGET static void GROUPED(block_rows)(const pa_grouped* p, int64_t start, int64_t end, int64_t block) {
    typedef void (*any_tile)(const pa_grouped*, int64_t, int64_t);
    static const any_tile tiles[] = {
        GROUPED(tile)<1, BITS>,  GROUPED(tile)<2, BITS>,  GROUPED(tile)<3, BITS>,  GROUPED(tile)<4, BITS>,
#if defined(__AVX512F__)
        GROUPED(tile)<5, BITS>,  GROUPED(tile)<6, BITS>,  GROUPED(tile)<7, BITS>,  GROUPED(tile)<8, BITS>,
        GROUPED(tile)<9, BITS>,  GROUPED(tile)<10, BITS>, GROUPED(tile)<11, BITS>, GROUPED(tile)<12, BITS>,
        GROUPED(tile)<13, BITS>, GROUPED(tile)<14, BITS>, GROUPED(tile)<15, BITS>, GROUPED(tile)<16, BITS>,
#endif
    };
    const int64_t panels = (end - start + GROUPED_ROWS - 1) / GROUPED_ROWS;
    for (int64_t panel = 0, row = start; panel < panels; panel++) {
        const int64_t height = (end - row + panels - panel - 1) / (panels - panel);
        tiles[height - 1](p, row, block);
        row += height;
    }
}

// The blocks of sixteen outputs from `start` on, for rows whose integers stay in the cache.
GROUPED_TARGET static void GROUPED(blocks)(const pa_grouped* p, int64_t start, int64_t end) {
    for (int64_t row = 0; row < p->rows; row += CHUNK_ROWS)
        for (int64_t block = start; block < end; block++) {
            const int64_t last = smaller(row + CHUNK_ROWS, p->rows);
            if (p->bits == 8)
                GROUPED(block_rows)<8>(p, row, last, block);
            else
                GROUPED(block_rows)<4>(p, row, last, block);
        }
}
