// What sanitizers watch: every exported function over sizes, element types, odd addresses, threads and instruction sets.
// Buffers are of their exact size, so that a read or write beyond is seen. The values are held against those of the
// portable kernels on one thread, bit by bit; what they should be is the matter of tests/unit/ops/test_native_kernels.py.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../kernels/kernels.h"

namespace {

uint64_t seed = 1;

uint32_t draw() {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(seed >> 33);
}

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
    std::exit(1);
}

void expect(bool holds, const std::string& what) {
    if (!holds) fail(what);
}

int64_t itemsize_of(int32_t type) {
    static const int64_t sizes[PA_TYPE_COUNT] = {8, 4, 2, 2, 8, 4, 2, 1, 1};
    return sizes[type];
}

// `numel` elements that end where their allocation ends, at an address that is a multiple of the element's size only.
struct Memory {
    std::vector<uint8_t> room;
    int32_t type;
    int64_t numel;

    Memory(int64_t numel, int32_t type) : type(type), numel(numel) {
        room.resize(static_cast<size_t>((numel + 1) * itemsize_of(type)));
        for (int64_t i = 0; i < numel; i++) put(i);
    }

    uint8_t* data() { return room.data() + itemsize_of(type); }

    pa_array array() { return {data(), type}; }

    // Positive values, for some are averages of squares; among the 16-bit ones any exponent but NaN's.
    void put(int64_t i) {
        uint8_t* const at = data() + i * itemsize_of(type);
        const float value = static_cast<float>(draw() % 4096 + 1) / 1024.0f;
        if (type == PA_FLOAT32) {
            std::memcpy(at, &value, sizeof value);
        } else if (type == PA_FLOAT64) {
            const double wide = value;
            std::memcpy(at, &wide, sizeof wide);
        } else if (type == PA_BFLOAT16 || type == PA_FLOAT16) {
            const uint16_t half = static_cast<uint16_t>(draw() % (type == PA_FLOAT16 ? 0x7800 : 0x4100));
            std::memcpy(at, &half, sizeof half);
        } else {
            for (int64_t byte = 0; byte < itemsize_of(type); byte++) at[byte] = static_cast<uint8_t>(draw());
        }
    }
};

const double CONSTANTS[PA_MOST_CONSTANTS] = {0.9, 0.1, 0.95, 0.05, 1.5, 1.25, 1e-3, 0.01, 0.75, 0.5};
const int32_t FLOATS[] = {PA_FLOAT32, PA_BFLOAT16, PA_FLOAT16};
const int64_t SIZES[] = {0, 1, 7, 16, 33, 1023, 1024, 1025, 5000};
const int64_t MANY_PARTS = 140001;

// The contents of all buffers after one update whose element types and data are those of `start`; each third is over
// bfloat16 alone.
std::vector<uint8_t> after_update(int32_t kind, int64_t numel, uint64_t start, int32_t threads) {
    seed = start;
    const pa_shape update = pa_update_shape(kind);
    std::vector<Memory> buffers;
    std::vector<pa_array> arrays;
    const bool is_narrow = start % 3 == 0;
    for (int32_t i = 0; i < update.arrays; i++)
        buffers.emplace_back(numel, is_narrow ? static_cast<int32_t>(PA_BFLOAT16) : FLOATS[draw() % 3]);
    buffers.emplace_back(numel, FLOATS[draw() % 3]);
    for (Memory& buffer : buffers) arrays.push_back(buffer.array());
    pa_array out = arrays.back();
    if (is_narrow || draw() % 2) out.data = nullptr;
    // The index of an element passes 2^32 on the way.
    const pa_rounding rounding = {{draw(), draw()}, 0xfffffff0};
    const int32_t code = pa_update(kind, numel, arrays.data(), update.arrays, out, CONSTANTS, update.constants,
                                   !is_narrow && draw() % 2 ? &rounding : nullptr, threads);
    expect(code == 0, std::string("pa_update refused ") + update.name);
    std::vector<uint8_t> contents;
    for (Memory& buffer : buffers) contents.insert(contents.end(), buffer.room.begin(), buffer.room.end());
    return contents;
}

std::vector<uint8_t> after_others(int64_t numel, uint64_t start, int32_t threads) {
    seed = start;
    std::vector<uint8_t> contents;
    for (int32_t type : {PA_FLOAT64, PA_INT64, PA_INT32, PA_INT16, PA_INT8, PA_UINT8})
        for (int32_t kind = PA_SUM; kind <= PA_PROD; kind++) {
            Memory target(numel, type), source(numel, type);
            expect(pa_combine(kind, numel, type, target.data(), source.data(), threads) == 0, "pa_combine");
            contents.insert(contents.end(), target.room.begin(), target.room.end());
        }
    std::vector<Memory> pieces;
    for (int32_t type : {PA_FLOAT64, PA_FLOAT32, PA_BFLOAT16, PA_FLOAT16}) pieces.emplace_back(numel, type);
    std::vector<pa_array> arrays;
    for (Memory& piece : pieces) arrays.push_back(piece.array());
    const int64_t indices[] = {0, 2, 1, 2}, numels[] = {numel, numel, numel, numel};
    Memory sums(3, PA_FLOAT64);
    expect(pa_square_sums(reinterpret_cast<double*>(sums.data()), 4, indices, arrays.data(), numels, threads) == 0,
           "pa_square_sums");
    contents.insert(contents.end(), sums.room.begin(), sums.room.end());
    for (int32_t bits : {4, 8})
        for (int64_t block : {2, 64, 3000})
            for (int32_t type : FLOATS) {
                Memory values(numel, type), back(numel, type);
                Memory codes(bits == 8 ? numel : (numel + 1) / 2, PA_UINT8), scales((numel + block - 1) / block, PA_FLOAT32);
                float* const at = reinterpret_cast<float*>(scales.data());
                expect(pa_quantize(bits, numel, block, values.array(), codes.data(), at, threads) == 0, "pa_quantize");
                expect(pa_dequantize(bits, numel, block, back.array(), codes.data(), at, threads) == 0, "pa_dequantize");
                for (Memory* memory : {&codes, &scales, &back})
                    contents.insert(contents.end(), memory->room.begin(), memory->room.end());
            }
    return contents;
}

void every_function_agrees(const std::string& isa) {
    std::vector<int64_t> sizes(SIZES, SIZES + sizeof SIZES / sizeof *SIZES);
    sizes.push_back(MANY_PARTS);
    for (int64_t numel : sizes) {
        const int32_t threads = numel == MANY_PARTS ? 3 : 1;
        for (int32_t kind = 0; pa_update_shape(kind).name; kind++)
            for (uint64_t start = 1; start <= (numel == MANY_PARTS ? 1 : 3); start++) {
                expect(pa_choose_isa(isa.c_str()) == 0, isa);
                const auto ours = after_update(kind, numel, start, threads);
                pa_choose_isa("portable");
                pa_choose_isa("neon");
                expect(ours == after_update(kind, numel, start, 1),
                       isa + ": " + pa_update_shape(kind).name + " of " + std::to_string(numel));
            }
        expect(pa_choose_isa(isa.c_str()) == 0, isa);
        const auto ours = after_others(numel, 7, threads);
        pa_choose_isa("portable");
        pa_choose_isa("neon");
        expect(ours == after_others(numel, 7, 1), isa + ": other kernels of " + std::to_string(numel));
    }
}

// The products of two matrices by `isa`: the first with two segments, the second transposed.
std::vector<float> after_products(int64_t rows, int64_t inner, int64_t columns, int32_t threads) {
    seed = 5;
    std::vector<float> a(rows * inner), b(inner * columns), c(2 * rows * columns);
    for (float& value : a) value = static_cast<float>(draw() % 64);
    for (float& value : b) value = static_cast<float>(draw() % 64);
    const int64_t segments[] = {inner / 2, inner - inner / 2, inner};
    const pa_product products[] = {
        {a.data(), b.data(), c.data(), rows, inner, columns, inner, 1, columns, 1, columns, 2},
        {a.data(), b.data(), c.data() + rows * columns, rows, inner, columns, inner, 1, 1, inner, columns, 1},
    };
    std::vector<float> scratch(pa_products_scratch(2, products, threads));
    expect(pa_products(2, products, segments, scratch.data(), threads) == 0, "products");
    return c;
}

// Whole numbers, so that every order of additions and every instruction set has the same sums.
void products_agree(const std::string& isa) {
    for (int64_t rows : {0, 1, 5, 14, 15, 61})
        for (int64_t inner : {0, 1, 9, 40})
            for (int64_t columns : {1, 8, 31, 32, 70}) {
                expect(pa_choose_isa(isa.c_str()) == 0, isa);
                const auto ours = after_products(rows, inner, columns, 3);
                pa_choose_isa("portable");
                pa_choose_isa("neon");
                expect(ours == after_products(rows, inner, columns, 1), isa + ": products of " + std::to_string(rows));
            }
    expect(pa_choose_isa(isa.c_str()) == 0, isa);
    const pa_product bad = {nullptr, nullptr, nullptr, 1, 2, 3, 2, 1, 3, 1, 3, 1};
    const int64_t short_by_one = 1;
    expect(pa_products(1, &bad, &short_by_one, nullptr, 1) == PA_BAD_COUNT, "segments that do not add up");
}

// A @ A' - 3 * added by `isa`, which is symmetric.
std::vector<float> after_symmetric(int64_t size, int64_t inner, bool is_transposed, int32_t threads) {
    seed = 6;
    std::vector<float> a(size * inner), added(size * size), c(size * size);
    for (float& value : a) value = static_cast<float>(draw() % 64);
    for (int64_t i = 0; i < size * size; i++) added[i] = static_cast<float>((i / size + i % size) % 64);
    std::vector<float> scratch(pa_symmetric_scratch(size, inner, threads));
    const int64_t row = is_transposed ? 1 : inner, column = is_transposed ? size : 1;
    const pa_symmetric product = {a.data(), a.data(), added.data(), c.data(), size, inner, row, column, column, row, 1, -3};
    expect(pa_symmetric_product(&product, scratch.data(), threads) == 0, "a symmetric product");
    return c;
}

void symmetric_products_agree(const std::string& isa) {
    for (int64_t size : {0, 1, 8, 14, 33, 77})
        for (int64_t inner : {0, 1, 40})
            for (bool is_transposed : {false, true}) {
                expect(pa_choose_isa(isa.c_str()) == 0, isa);
                const auto ours = after_symmetric(size, inner, is_transposed, 3);
                pa_choose_isa("portable");
                pa_choose_isa("neon");
                expect(ours == after_symmetric(size, inner, is_transposed, 1), isa + ": symmetric " + std::to_string(size));
                for (int64_t i = 0; i < size * size; i++) expect(ours[i] == ours[i % size * size + i / size], "mirrored");
            }
    expect(pa_choose_isa(isa.c_str()) == 0, isa);
}

void wrong_arguments_are_refused() {
    Memory buffer(4, PA_FLOAT32), wide(4, PA_FLOAT64);
    pa_array arrays[] = {buffer.array(), wide.array()};
    const pa_array none = {nullptr, 0};
    int32_t kinds = 0;
    while (pa_update_shape(kinds).name) kinds++;
    expect(kinds > PA_FIRST_OPTIMIZER && !pa_update_shape(-1).name, "the list of updates");
    expect(pa_update(kinds, 4, arrays, 1, none, CONSTANTS, 1, nullptr, 1) == PA_BAD_KIND, "kind");
    expect(pa_update(PA_SCALE, 4, arrays, 2, none, CONSTANTS, 1, nullptr, 1) == PA_BAD_COUNT, "arrays");
    expect(pa_update(PA_SCALE, 4, arrays, 1, none, CONSTANTS, 2, nullptr, 1) == PA_BAD_COUNT, "constants");
    expect(pa_update(PA_SUM, 4, arrays, 2, none, nullptr, 0, nullptr, 1) == PA_BAD_TYPE, "type");
    expect(pa_combine(PA_SUM, 4, PA_FLOAT32, buffer.data(), buffer.data(), 1) == PA_BAD_TYPE, "combine");
    float scale = 0;
    uint8_t codes[4];
    expect(pa_quantize(5, 4, 2, arrays[0], codes, &scale, 1) == PA_BAD_KIND, "bits");
    expect(pa_quantize(4, 4, 3, arrays[0], codes, &scale, 1) == PA_BAD_COUNT, "odd block");
    expect(pa_choose_isa("abacus") == PA_BAD_KIND, "abacus");
}

// Several callers at once: one has the threads, the others work alone.
void callers_do_not_disturb_each_other() {
    std::vector<Memory> targets, sources;
    for (int caller = 0; caller < 4; caller++) {
        targets.emplace_back(MANY_PARTS, PA_FLOAT32);
        sources.emplace_back(MANY_PARTS, PA_FLOAT32);
        std::memset(targets.back().data(), 0, MANY_PARTS * sizeof(float));
    }
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; caller++)
        callers.emplace_back([&, caller] {
            pa_array arrays[] = {targets[caller].array(), sources[caller].array()};
            for (int time = 0; time < 8; time++) 
                pa_update(PA_SUM, MANY_PARTS, arrays, 2, {nullptr, 0}, nullptr, 0, nullptr, 3);
        });
    for (std::thread& caller : callers) caller.join();
    for (int caller = 0; caller < 4; caller++)
        for (int64_t i = 0; i < MANY_PARTS; i++) {
            float target, source;
            std::memcpy(&target, targets[caller].data() + 4 * i, 4);
            std::memcpy(&source, sources[caller].data() + 4 * i, 4);
            expect(target == 8 * source, "callers at once, element " + std::to_string(i));
        }
}

void a_forked_child_has_threads_of_its_own() {
    const auto ours = after_update(PA_FIRST_OPTIMIZER, MANY_PARTS, 3, 3);
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        _exit(after_update(PA_FIRST_OPTIMIZER, MANY_PARTS, 3, 3) == ours ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    expect(status == 0, "a forked child ended with status " + std::to_string(status));
}

}  // namespace

int main() {
    expect(pa_abi_version() == PA_ABI_VERSION, "version");
    int isas = 0;
    for (const char* isa : {"avx512", "avx2", "portable", "neon"})
        if (pa_choose_isa(isa) == 0) {
            every_function_agrees(isa);
            products_agree(isa);
            symmetric_products_agree(isa);
            std::printf("%s agrees\n", isa);
            isas++;
        }
    expect(isas > 0, "no instruction set");
    wrong_arguments_are_refused();
    callers_do_not_disturb_each_other();
#if !defined(__SANITIZE_THREAD__)  // which does not follow threads made after a fork
    a_forked_child_has_threads_of_its_own();
#endif
    std::puts("kernel tests passed");
}
