// Defines ISA_TABLE, named ISA_NAME, from kernels that are all `static`: were they shared, the linker could put one that
// needs AVX-512 where a lesser processor calls it. For the same reason nothing here includes a C++ header.
#include "blocks.h"
#include "isa.h"
#include "../decode/attention.h"
#include "../decode/grouped.h"
#include "../decode/rowwise.h"
#include "../products/symmetric.h"
#include "sums.h"
#include "sweep.h"

extern const isa_kernels ISA_TABLE = {ISA_NAME,    shape,          sweep,           square_sum_block,
                                     combine_any, quantize_block, dequantize_block,
                                     TILE_COLUMNS, pack_rows,      product_columns,
                                     symmetric_panels, symmetric_rows, symmetric_columns, MIRRORED, symmetric_mirror,
                                     linear_part,
                                     grouped_steps, grouped_part,   rowwise_part, attention_part};
