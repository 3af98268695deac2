// The kernels compiled for one instruction set. Each isa_*.cpp compiles the same code with other flags; isa.cpp chooses.
#pragma once

#include "kernels.h"

// Elements in a block of pa_square_sums.
enum { SUM_BLOCK = 1024 };

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t itemsize_of(int32_t type) {
    static const int64_t sizes[PA_TYPE_COUNT] = {8, 4, 2, 2, 8, 4, 2, 1, 1};
    return sizes[type];
}

typedef struct {
    const char* name;
    pa_shape (*shape)(int32_t kind);
    void (*sweep)(int32_t kind, const pa_array* arrays, pa_array out, const float* constants,
                  const pa_rounding* rounding, int64_t start, int64_t end);
    double (*square_sum_block)(const void* data, int32_t type, int64_t numel);
    void (*combine_any)(int32_t kind, int32_t type, void* target, const void* source, int64_t numel);
    void (*quantize_block)(int32_t bits, pa_array source, uint8_t* codes, float* scale, int64_t start, int64_t end);
    void (*dequantize_block)(int32_t bits, pa_array out, const uint8_t* codes, float scale, int64_t start,
                             int64_t end);
    int64_t tile_columns;
    void (*pack_rows)(const pa_product* product, float* to);
    void (*product_columns)(const pa_product* product, const int64_t* segments, const float* rows, int64_t start,
                            const float* next, float* scratch);
    int64_t (*symmetric_panels)(const pa_symmetric* product);
    void (*symmetric_rows)(const pa_symmetric* product, int64_t panel, float* to);
    void (*symmetric_columns)(const pa_symmetric* product, const float* rows, int64_t start, float* scratch);
    int64_t mirrored;
    void (*symmetric_mirror)(const pa_symmetric* product, int64_t start);
    void (*linear_part)(const pa_linear* layer, int64_t start, int64_t end);
    void (*grouped_steps)(const pa_grouped* layer, int64_t row);
    void (*grouped_part)(const pa_grouped* layer, int64_t start, int64_t end);
    void (*rowwise_part)(const pa_rowwise* call, int64_t row);
    void (*attention_part)(const pa_attention* call, int64_t sequence, int64_t head, float* scratch);
} isa_kernels;

extern const isa_kernels ISA_PORTABLE;
#if defined(__x86_64__)
extern const isa_kernels ISA_AVX2;
extern const isa_kernels ISA_AVX512;
#endif

// The chosen kernels; the best of this processor until pa_choose_isa.
const isa_kernels* isa_current(void);
