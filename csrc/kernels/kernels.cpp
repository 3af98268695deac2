// The exported functions: check the arguments, share out the work.

#include "kernels.h"

#include "isa.h"
#include "parallel.h"

namespace {

// A thread's share at a time: large enough to hide its cost, small enough to even out busy cores.
enum { PART_NUMEL = 1 << 16 };

// How many sums of blocks are kept to be added in pairs, and how many of them are a thread's share.
enum { BLOCKS_AT_ONCE = 4096, BLOCKS_IN_PART = 64 };

int64_t parts_of(int64_t numel, int64_t part) { return (numel + part - 1) / part; }

bool is_narrowable(int32_t type) { return type == PA_FLOAT32 || type == PA_BFLOAT16 || type == PA_FLOAT16; }

struct Update {
    const isa_kernels* isa;
    int32_t kind;
    int64_t numel;
    const pa_array* arrays;
    pa_array out;
    const float* constants;
    const pa_rounding* rounding;
};

struct Combine {
    const isa_kernels* isa;
    int32_t kind, type;
    int64_t numel, itemsize;
    char *target, *source;
};

struct Squares {
    const isa_kernels* isa;
    const char* data;
    int32_t type;
    int64_t numel, itemsize;
    double* sums;
};

struct Blocks {
    const isa_kernels* isa;
    int32_t bits;
    int64_t numel, block_numel, blocks_in_part;
    pa_array values;
    uint8_t* codes;
    float* scales;
    bool is_quantizing;
};

void update_part(void* context, int64_t part) {
    const Update& u = *static_cast<Update*>(context);
    const int64_t start = part * PART_NUMEL;
    u.isa->sweep(u.kind, u.arrays, u.out, u.constants, u.rounding, start, smaller(start + PART_NUMEL, u.numel));
}

void combine_part(void* context, int64_t part) {
    const Combine& c = *static_cast<Combine*>(context);
    const int64_t start = part * PART_NUMEL, offset = start * c.itemsize;
    c.isa->combine_any(c.kind, c.type, c.target + offset, c.source + offset, smaller(PART_NUMEL, c.numel - start));
}

void squares_part(void* context, int64_t part) {
    const Squares& s = *static_cast<Squares*>(context);
    const int64_t blocks = parts_of(s.numel, SUM_BLOCK), first = part * BLOCKS_IN_PART;
    for (int64_t block = first; block < smaller(first + BLOCKS_IN_PART, blocks); block++) {
        const int64_t start = block * SUM_BLOCK;
        s.sums[block] =
            s.isa->square_sum_block(s.data + start * s.itemsize, s.type, smaller(SUM_BLOCK, s.numel - start));
    }
}

void blocks_part(void* context, int64_t part) {
    const Blocks& b = *static_cast<Blocks*>(context);
    const int64_t blocks = parts_of(b.numel, b.block_numel), first = part * b.blocks_in_part;
    for (int64_t block = first; block < smaller(first + b.blocks_in_part, blocks); block++) {
        const int64_t start = block * b.block_numel, end = smaller(start + b.block_numel, b.numel);
        if (b.is_quantizing)
            b.isa->quantize_block(b.bits, b.values, b.codes, b.scales + block, start, end);
        else
            b.isa->dequantize_block(b.bits, b.values, b.codes, b.scales[block], start, end);
    }
}

double sum_in_pairs(const double* values, int64_t count) {
    if (count == 1) return values[0];
    const int64_t half = count / 2;
    return sum_in_pairs(values, half) + sum_in_pairs(values + half, count - half);
}

double square_sum(const isa_kernels* isa, pa_array piece, int64_t numel, int32_t threads) {
    const int64_t itemsize = itemsize_of(piece.type);
    const int64_t at_once = static_cast<int64_t>(SUM_BLOCK) * BLOCKS_AT_ONCE;
    double total = 0, sums[BLOCKS_AT_ONCE];
    for (int64_t start = 0; start < numel; start += at_once) {
        const int64_t some = smaller(at_once, numel - start), blocks = parts_of(some, SUM_BLOCK);
        Squares squares{isa, static_cast<const char*>(piece.data) + start * itemsize, piece.type, some, itemsize, sums};
        parallel_for(parts_of(blocks, BLOCKS_IN_PART), threads, squares_part, &squares);
        total += sum_in_pairs(sums, blocks);
    }
    return total;
}

int32_t run_blocks(int32_t bits, int64_t numel, int64_t block_numel, pa_array values, uint8_t* codes, float* scales,
                   int32_t threads, bool is_quantizing) {
    if (bits != 8 && bits != 4) return PA_BAD_KIND;
    if (!is_narrowable(values.type)) return PA_BAD_TYPE;
    if (numel < 0 || block_numel < 1 || (bits == 4 && block_numel % 2)) return PA_BAD_COUNT;
    const int64_t in_part = block_numel < PART_NUMEL ? PART_NUMEL / block_numel : 1;
    Blocks blocks{isa_current(), bits, numel, block_numel, in_part, values, codes, scales, is_quantizing};
    parallel_for(parts_of(parts_of(numel, block_numel), in_part), threads, blocks_part, &blocks);
    return 0;
}

}  // namespace

int32_t pa_abi_version(void) { return PA_ABI_VERSION; }

pa_shape pa_update_shape(int32_t kind) { return isa_current()->shape(kind); }

int32_t pa_update(int32_t kind, int64_t numel, const pa_array* arrays, int32_t array_count, pa_array out,
                  const double* constants, int32_t constant_count, const pa_rounding* rounding, int32_t threads) {
    const isa_kernels* const isa = isa_current();
    const pa_shape shape = isa->shape(kind);
    if (!shape.name) return PA_BAD_KIND;
    if (numel < 0 || array_count != shape.arrays || constant_count != shape.constants) return PA_BAD_COUNT;
    for (int32_t i = 0; i < array_count; i++)
        if (!is_narrowable(arrays[i].type)) return PA_BAD_TYPE;
    if (out.data && !is_narrowable(out.type)) return PA_BAD_TYPE;
    float rounded[PA_MOST_CONSTANTS];
    for (int32_t i = 0; i < constant_count; i++) rounded[i] = static_cast<float>(constants[i]);
    Update update{isa, kind, numel, arrays, out, rounded, rounding};
    parallel_for(parts_of(numel, PART_NUMEL), threads, update_part, &update);
    return 0;
}

int32_t pa_combine(int32_t kind, int64_t numel, int32_t type, void* target, const void* source, int32_t threads) {
    if (kind < PA_SUM || kind > PA_PROD) return PA_BAD_KIND;
    if (type < 0 || type >= PA_TYPE_COUNT || is_narrowable(type)) return PA_BAD_TYPE;
    if (numel < 0) return PA_BAD_COUNT;
    Combine combine{isa_current(),      kind, type, numel, itemsize_of(type), static_cast<char*>(target),
                    static_cast<char*>(const_cast<void*>(source))};
    parallel_for(parts_of(numel, PART_NUMEL), threads, combine_part, &combine);
    return 0;
}

int32_t pa_square_sums(double* out, int64_t count, const int64_t* indices, const pa_array* pieces,
                       const int64_t* numels, int32_t threads) {
    for (int64_t i = 0; i < count; i++) {
        if (pieces[i].type != PA_FLOAT64 && !is_narrowable(pieces[i].type)) return PA_BAD_TYPE;
        if (numels[i] < 0) return PA_BAD_COUNT;
    }
    for (int64_t i = 0; i < count; i++) out[indices[i]] += square_sum(isa_current(), pieces[i], numels[i], threads);
    return 0;
}

int32_t pa_quantize(int32_t bits, int64_t numel, int64_t block_numel, pa_array source, uint8_t* codes, float* scales,
                    int32_t threads) {
    return run_blocks(bits, numel, block_numel, source, codes, scales, threads, true);
}

int32_t pa_dequantize(int32_t bits, int64_t numel, int64_t block_numel, pa_array out, const uint8_t* codes,
                      const float* scales, int32_t threads) {
    return run_blocks(bits, numel, block_numel, out, const_cast<uint8_t*>(codes), const_cast<float*>(scales), threads,
                      false);
}
