// What sanitizers watch of decoding: sizes, element types, strides, threads and instruction sets, in buffers of their exact
// size. Values are held against those of the portable kernels; what they should be is the matter of
// tests/unit/ops/test_decode_kernels.py.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "../kernels/kernels.h"

namespace {

uint64_t seed = 1;

float draw() {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<int32_t>(seed >> 40) - (1 << 23)) / static_cast<float>(1 << 23);
}

void expect(bool holds, const std::string& what) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
    std::exit(1);
}

// Values that end where their allocation ends.
struct Values {
    std::vector<uint8_t> room;
    int32_t type;
    int64_t numel;

    Values(int64_t numel, int32_t type, bool is_zero = false) : type(type), numel(numel) {
        room.resize(static_cast<size_t>(numel * size()));
        for (int64_t i = 0; i < numel; i++) {
            const float value = is_zero ? 0.0f : draw();
            uint32_t bits;
            std::memcpy(&bits, &value, sizeof bits);
            const uint16_t half = static_cast<uint16_t>(bits >> 16);
            if (type == PA_FLOAT32)
                std::memcpy(room.data() + 4 * i, &value, 4);
            else
                std::memcpy(room.data() + 2 * i, &half, 2);
        }
    }

    int64_t size() const { return type == PA_FLOAT32 ? 4 : 2; }
    void* data() { return room.data(); }

    float at(int64_t i) const {
        uint32_t bits = 0;
        uint16_t half;
        float value;
        if (type == PA_FLOAT32) {
            std::memcpy(&bits, room.data() + 4 * i, 4);
        } else {
            std::memcpy(&half, room.data() + 2 * i, 2);
            bits = static_cast<uint32_t>(half) << 16;
        }
        std::memcpy(&value, &bits, 4);
        return value;
    }
};

const int32_t TYPES[] = {PA_FLOAT32, PA_BFLOAT16};

// The outputs of a call on every instruction set, with one thread and with three.
void compare(const std::string& what, const std::function<Values(int32_t)>& call) {
    expect(pa_choose_isa("portable") == 0 || pa_choose_isa("neon") == 0, "the portable kernels");
    seed = 7;
    const Values wanted = call(1);
    float most = 1;
    for (int64_t i = 0; i < wanted.numel; i++) most = std::fmax(most, std::fabs(wanted.at(i)));
    for (const char* isa : {"portable", "neon", "avx2", "avx512"}) {
        if (pa_choose_isa(isa)) continue;
        seed = 7;
        const Values one = call(1);
        seed = 7;
        const Values three = call(3);
        expect(one.room == three.room, what + ": threads change bits on " + isa);
        const float bound = most * (one.type == PA_FLOAT32 ? 1e-4f : 3e-2f);
        for (int64_t i = 0; i < one.numel; i++)
            expect(std::fabs(one.at(i) - wanted.at(i)) <= bound, what + " on " + isa + " at " + std::to_string(i));
    }
}

Values linear(int32_t type, int64_t rows, int64_t inner, int64_t columns, bool by_inputs, bool has_bias, int32_t threads) {
    Values x(rows * inner, type), w(inner * columns, type), bias(columns, type), y(rows * columns, type, true);
    const pa_linear layer = {x.data(), w.data(), has_bias ? bias.data() : nullptr, y.data(), rows, inner, columns, inner,
                             columns, by_inputs ? 1 : inner, by_inputs ? columns : 1, type};
    expect(pa_linear_rows(&layer, threads) == 0, "pa_linear_rows");
    return y;
}

Values grouped(int32_t type, int64_t rows, int64_t inner, int64_t columns, int64_t group, int32_t bits, int32_t threads) {
    const int64_t blocks = (columns + 15) / 16, groups = (inner + group - 1) / group, units = (group + 3) / 4;
    Values x(rows * inner, type), bias(columns, type), y(rows * columns, type, true), scales(blocks * groups * 16, PA_FLOAT32);
    std::vector<uint8_t> codes(static_cast<size_t>(blocks * groups * units * 8 * bits));
    for (uint8_t& code : codes) code = static_cast<uint8_t>(static_cast<int32_t>(draw() * 120.0f));
    std::vector<int16_t> steps(static_cast<size_t>(rows * groups * units * 4));
    std::vector<float> step_scales(static_cast<size_t>(rows * groups));
    std::vector<int32_t> sums(static_cast<size_t>(rows * groups));
    const pa_grouped layer = {x.data(), bias.data(), y.data(), codes.data(), static_cast<float*>(scales.data()),
                              steps.data(), step_scales.data(), sums.data(), rows, inner, columns, group, inner, columns,
                              bits, type};
    expect(pa_grouped_rows(&layer, threads) == 0, "pa_grouped_rows");
    return y;
}

// A cache of random keys and values (slots, key heads, capacity, head) in pages that lie in the opposite order.
struct Pages {
    std::vector<char> memory;
    std::vector<int64_t> table;
    int64_t tokens, in_slot, values;

    Pages(int32_t type, int64_t slots, int64_t key_heads, int64_t capacity, int64_t head, int64_t tokens)
        : tokens(tokens), in_slot((capacity + tokens - 1) / tokens), values(key_heads * tokens * head) {
        Values drawn(2 * slots * key_heads * capacity * head, type);
        const int64_t nbytes = (type == PA_FLOAT32 ? 4 : 2) * head, page_nbytes = 2 * key_heads * tokens * nbytes;
        memory.resize(static_cast<size_t>(slots * in_slot * page_nbytes));
        for (int64_t i = slots * in_slot; i-- > 0;) table.push_back(reinterpret_cast<int64_t>(memory.data() + i * page_nbytes));
        const char* from = static_cast<const char*>(drawn.data());
        for (int64_t slot = 0; slot < slots; slot++)
            for (int64_t h = 0; h < 2 * key_heads; h++)
                for (int64_t t = 0; t < capacity; t++, from += nbytes) {
                    const int64_t page = table[static_cast<size_t>(slot * in_slot + t / tokens)];
                    std::memcpy(reinterpret_cast<char*>(page) + (h * tokens + t % tokens) * nbytes, from, static_cast<size_t>(nbytes));
                }
    }
};

// Norms, attention and an activation, as one call; the last output. The size of pages depends on the threads.
Values steps(int32_t type, int64_t rows, int64_t head, int64_t rotated, int32_t kind, int32_t threads) {
    const int64_t heads = 4, key_heads = 2, capacity = 6, width = heads * head, slots = rows + 1;
    Values x(rows * width, type), weight(width, type), bias(width, type), normed(rows * width, type, true);
    Values k(rows * key_heads * head, type), v(rows * key_heads * head, type), out(rows * width, type, true);
    const Pages pages(type, slots, key_heads, capacity, head, threads > 1 ? 2 : capacity + 1);
    Values cosines(capacity * rotated, type), sines(capacity * rotated, type), y(rows * width, type, true);
    std::vector<int64_t> positions, places;
    for (int64_t row = 0; row < rows; row++) {
        positions.push_back(row % capacity);
        places.push_back(slots - 1 - row);
    }
    std::vector<float> scratch(static_cast<size_t>(((head + 15) / 16 * 16 + pages.tokens * pages.in_slot) * threads));
    const pa_rowwise norm = {x.data(), nullptr, weight.data(), bias.data(), normed.data(), width, 1, width, 0, width, 1e-5f,
                             kind % 2 ? PA_LAYER_NORM : PA_RMS_NORM, type};
    const pa_attention attention = {normed.data(), k.data(), v.data(), out.data(), cosines.data(), sines.data(),
                                    positions.data(), places.data(), pages.table.data(), pages.tokens, pages.in_slot, 0,
                                    pages.values, 0, heads, key_heads, head, rotated, width, key_heads * head, key_heads * head, width, head, head,
                                    head, 0.3f, type};
    const pa_rowwise act = {out.data(), kind == PA_ADD || kind % 2 ? x.data() : nullptr, nullptr, nullptr, y.data(), head,
                            heads, width, width, width, 0, kind, type};
    const pa_step all[] = {{&norm, PA_STEP_ROWWISE}, {&attention, PA_STEP_ATTENTION}, {&act, PA_STEP_ROWWISE}};
    expect(pa_steps(3, all, rows, scratch.data(), threads) == 0, "pa_steps");
    const pa_step wrong = {&act, 99};
    expect(pa_steps(1, &wrong, rows, scratch.data(), threads) == PA_BAD_KIND, "a step of no kind");
    return y;
}

}  // namespace

int main() {
    const int64_t shapes[][2] = {{1, 1}, {33, 70}, {64, 96}, {31, 7}, {130, 400}};
    for (const int32_t type : TYPES)
        for (const auto& shape : shapes)
            for (const int64_t rows : {1, 4, 5, 13, 17}) {
                const std::string name = std::to_string(type) + " " + std::to_string(shape[0]) + " " + std::to_string(rows);
                for (const bool by_inputs : {false, true})
                    compare("linear " + name, [&](int32_t threads) {
                        return linear(type, rows, shape[0], shape[1], by_inputs, rows % 2, threads);
                    });
                for (const int32_t bits : {8, 4})
                    for (const int64_t group : {1, 5, 64, 200})
                        compare("grouped " + name, [&](int32_t threads) {
                            return grouped(type, rows, shape[0], shape[1], group, bits, threads);
                        });
            }
    for (const int32_t type : TYPES)
        for (int32_t kind = PA_SILU; kind < PA_ROWWISE_COUNT; kind++)
            for (const int64_t head : {2, 5, 8, 40, 70})
                compare("steps " + std::to_string(kind), [&](int32_t threads) {
                    return steps(type, 5, head, kind % 2 ? head / 2 / 2 * 2 : 0, kind, threads);
                });
    std::puts("decode_tests: passed");
    return 0;
}
