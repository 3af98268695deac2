// The C ABI of libpolyaccel_cpu, which Python calls by ctypes (polyaccel/ops/native.py has its other half).
//
// Pointers need the alignment of their element type and no more. Buffers of a call do not overlap. Nothing is allocated,
// nothing is thrown. Functions return 0, or one of PA_BAD_* without having touched a buffer. Sizes count elements.
#pragma once

#include <stdint.h>

#define PA_ABI_VERSION 10

#if defined(__GNUC__)
#define PA_EXPORT __attribute__((visibility("default")))
#else
#define PA_EXPORT
#endif

enum pa_type {
    PA_FLOAT64,
    PA_FLOAT32,
    PA_BFLOAT16,
    PA_FLOAT16,
    PA_INT64,
    PA_INT32,
    PA_INT16,
    PA_INT8,
    PA_UINT8,
    PA_TYPE_COUNT
};

// Elementwise updates of float32 values, whatever the types in memory. The formulas of the optimizers have the numbers
// that follow, in the order of UPDATES in updates.h; `pa_update_shape` gives their names.
enum pa_update { PA_SCALE, PA_CAST, PA_SUM, PA_MAX, PA_MIN, PA_PROD, PA_FIRST_OPTIMIZER };

enum { PA_MOST_ARRAYS = 5, PA_MOST_CONSTANTS = 10 };

enum pa_error { PA_BAD_KIND = 1, PA_BAD_TYPE = 2, PA_BAD_COUNT = 3 };

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    void* data;
    int32_t type;
} pa_array;

// Random bits for stochastic rounding: the key, and the index of the first element. random_bits in numbers.h has the rest.
typedef struct {
    uint32_t key[2];
    uint64_t start;
} pa_rounding;

PA_EXPORT int32_t pa_abi_version(void);

// The instruction set in use: "avx512", "avx2" or "portable" (on ARM: "neon"); and the choice of another, which fails
// with PA_BAD_KIND when the name is unknown or this processor lacks it.
PA_EXPORT const char* pa_isa(void);
PA_EXPORT int32_t pa_choose_isa(const char* name);

// An update's name, and how many arrays and constants it takes. The name is null behind the last one.
typedef struct {
    const char* name;
    int32_t arrays, constants;
} pa_shape;

PA_EXPORT pa_shape pa_update_shape(int32_t kind);

// One update of `numel` elements of floating types other than float64. `out` takes the first array's new values in its
// own type; its `data` may be null. A source (array 1 of PA_SUM, PA_MAX, PA_MIN and PA_PROD) is rounded to the type of
// array 0 first. Values are rounded to nearest even; with `rounding`, those of array 0 and `out` stochastically.
PA_EXPORT int32_t pa_update(int32_t kind, int64_t numel, const pa_array* arrays, int32_t array_count, pa_array out,
                            const double* constants, int32_t constant_count, const pa_rounding* rounding,
                            int32_t threads);

// target[i] = target[i] `kind` source[i] for float64 and integers, which wrap; `kind` from PA_SUM to PA_PROD.
PA_EXPORT int32_t pa_combine(int32_t kind, int64_t numel, int32_t type, void* target, const void* source,
                             int32_t threads);

// out[indices[i]] += the sum of squares of piece i, which has numels[i] elements. See [Note: Blocked summation].
PA_EXPORT int32_t pa_square_sums(double* out, int64_t count, const int64_t* indices, const pa_array* pieces,
                                 const int64_t* numels, int32_t threads);

// Symmetric block quantisation: scales[b] = max |source| of block b / (127 or 7), codes to nearest even. With 4 bits two
// codes share a byte, the first in the low half, and `block_numel` is even. A block with NaN or infinity has scale NaN.
PA_EXPORT int32_t pa_quantize(int32_t bits, int64_t numel, int64_t block_numel, pa_array source, uint8_t* codes,
                              float* scales, int32_t threads);
PA_EXPORT int32_t pa_dequantize(int32_t bits, int64_t numel, int64_t block_numel, pa_array out, const uint8_t* codes,
                                const float* scales, int32_t threads);

// C = A @ B in float32: element (i, k) of A is at a[i * a_row + k * a_column], (k, j) of B at b[k * b_row + j * b_column],
// (i, j) of C at c[i * c_row + j]. The inner dim is cut into so many segments. See [Note: Accumulation order of a product] in
// csrc/products/tiles.h.
typedef struct {
    const float *a, *b;
    float* c;
    int64_t rows, inner, columns, a_row, a_column, b_row, b_column, c_row, segments;
} pa_product;

// The products, whose segments follow each other in `segments`, with scratch memory for pa_products_scratch elements.
PA_EXPORT int64_t pa_products_scratch(int64_t count, const pa_product* products, int32_t threads);
PA_EXPORT int32_t pa_products(int64_t count, const pa_product* products, const int64_t* segments, float* scratch,
                              int32_t threads);

// C = alpha * A @ B + beta * added for (size, inner) by (inner, size), where C is known to be symmetric: it is computed up to
// the diagonal and mirrored. C and `added`, which may be null, have `size` elements a row. Strides and the order of sums
// are as in pa_products; scratch memory is for pa_symmetric_scratch elements.
typedef struct {
    const float *a, *b, *added;
    float* c;
    int64_t size, inner, a_row, a_column, b_row, b_column;
    float alpha, beta;
} pa_symmetric;

PA_EXPORT int64_t pa_symmetric_scratch(int64_t size, int64_t inner, int32_t threads);
PA_EXPORT int32_t pa_symmetric_product(const pa_symmetric* product, float* scratch, int32_t threads);

// y = x @ w' + bias for few rows; all of one type, PA_FLOAT32 or PA_BFLOAT16. The weight of output j for input k is at
// w[j * w_column + k * w_row], one of which is 1. `bias` may be null. See [Note: Rows of a linear layer].
typedef struct {
    const void *x, *w, *bias;
    void* y;
    int64_t rows, inner, columns, x_row, y_row, w_column, w_row;
    int32_t type;
} pa_linear;

PA_EXPORT int32_t pa_linear_rows(const pa_linear* layer, int32_t threads);

// y = x @ w' + bias for weights of 8 or 4 `bits` in groups of so many inputs, as [Note: Packed groups] in
// csrc/decode/grouped.h has them. x, y and bias are PA_FLOAT32 or PA_BFLOAT16; `bias` may be null. `steps` is scratch memory
// for rows * groups * (group up to a multiple of four) integers, the other two for rows * groups each.
typedef struct {
    const void *x, *bias;
    void* y;
    const uint8_t* codes;
    const float* scales;
    int16_t* steps;
    float* step_scales;
    int32_t* step_sums;
    int64_t rows, inner, columns, group, x_row, y_row;
    int32_t bits, type;
} pa_grouped;

PA_EXPORT int32_t pa_grouped_rows(const pa_grouped* layer, int32_t threads);

// Attention of one new token of each sequence. Its key, turned by its position, and its value are written into their page
// first: see [Note: Pages of keys and values] in csrc/decode/attention.h. A sequence's pages are those of row `slots` of
// (rows, pages_row) addresses. The first `rotated` elements of a head are turned by rows of the tables `cosines` and
// `sines`. `scratch` is for (head up to a multiple of 16 + page * pages_row) elements a thread.
typedef struct {
    const void *q, *k, *v;
    void* out;
    const void *cosines, *sines;
    const int64_t *positions, *slots, *pages;
    int64_t page, pages_row, keys, values;
    int64_t sequences, heads, key_heads, head, rotated, q_row, k_row, v_row, out_row, q_head, k_head, v_head;
    float scale;
    int32_t type;
} pa_attention;

PA_EXPORT int32_t pa_attend(const pa_attention* call, float* scratch, int32_t threads);

// Operations on the `width` neighbours of each row, a row in `per_row` parts: y = norm(x) * weight + bias, y = act(x) * other
// (`other` may be null), and y = x + other. All of one type, PA_FLOAT32 or PA_BFLOAT16; each operation that torch has is rounded
// by itself.
enum pa_rowwise_kind { PA_RMS_NORM, PA_LAYER_NORM, PA_SILU, PA_GELU, PA_GELU_TANH, PA_RELU, PA_ADD, PA_ROWWISE_COUNT };

typedef struct {
    const void *x, *other, *weight, *bias;
    void* y;
    int64_t width, per_row, x_row, other_row, y_row;
    float eps;
    int32_t kind, type;
} pa_rowwise;

// A model's operations on a token of each sequence, in their order. `call` is a pa_linear, pa_grouped, pa_attention or
// pa_rowwise by `kind`, whose count of rows is that of the function.
enum pa_step_kind { PA_STEP_LINEAR, PA_STEP_GROUPED, PA_STEP_ATTENTION, PA_STEP_ROWWISE };

typedef struct {
    const void* call;
    int64_t kind;
} pa_step;

PA_EXPORT int32_t pa_steps(int64_t count, const pa_step* steps, int64_t rows, float* scratch, int32_t threads);

#ifdef __cplusplus
}
#endif
