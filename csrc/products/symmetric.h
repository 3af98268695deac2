// Products that are known to be symmetric: tiles up to the diagonal, and the rest mirrored. See pa_symmetric.
#pragma once

#include "tiles.h"

// Rows of A, whose columns in `pack`'s sense are its rows, one panel.
static void symmetric_rows(const pa_symmetric* p, int64_t panel, float* to) {
    const int64_t start = panel_start(p->size, panel), height = panel_start(p->size, panel + 1) - start;
    pack(p->a + start * p->a_row, p->a_column, p->a_row, p->inner, height, height, to + start * p->inner);
}

static int64_t symmetric_panels(const pa_symmetric* p) { return panels_of(p->size); }

// The columns [start, start + TILE_COLUMNS) of C, down to the panel that meets the diagonal.
static void symmetric_columns(const pa_symmetric* p, const float* rows, int64_t start, float* scratch) {
    const int64_t size = p->size, columns = smaller(TILE_COLUMNS, size - start);
    pack(p->b + start * p->b_column, p->b_row, p->b_column, p->inner, columns, TILE_COLUMNS, scratch);
    const ahead_of nothing = {scratch, 0, 0};
    const float alpha = p->alpha, beta = p->beta;
    for (int64_t panel = 0; panel < panels_of(size); panel++) {
        const int64_t first = panel_start(size, panel), height = panel_start(size, panel + 1) - first;
        if (first >= start + columns) break;
        float* const to = p->c + first * size + start;
        tiles_of(height)(p->inner, rows + first * p->inner, scratch, to, size, columns, false, nothing);
        for (int64_t row = 0; row < height; row++) {
            float* const c = to + row * size;
            if (p->added) {
                const float* const added = p->added + (first + row) * size + start;
                for (int64_t i = 0; i < columns; i++) c[i] = alpha * c[i] + beta * added[i];
            } else if (alpha != 1.0f) {
                for (int64_t i = 0; i < columns; i++) c[i] = alpha * c[i];
            }
        }
    }
}

// The rows [start, start + MIRRORED) of C left of the diagonal, from the columns above it.
enum { MIRRORED = 8 };
static void symmetric_mirror(const pa_symmetric* p, int64_t start) {
    const int64_t size = p->size, end = smaller(start + MIRRORED, size);
    float* const c = p->c;
    int64_t column = 0;
#if defined(__AVX2__)
    if (end - start == MIRRORED)
        for (; column + 8 <= start; column += 8) transpose_block(c + column * size + start, size, c + start * size + column, size);
#endif
    for (int64_t row = start; row < end; row++)
        for (int64_t j = column; j < row; j++) c[row * size + j] = c[j * size + row];
}
