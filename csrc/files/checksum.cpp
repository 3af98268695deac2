// [Note: CRC folding]
// A CRC is the remainder of a polynomial over the field of two elements, whose coefficients are the bits of the message,
// lowest bit of a byte first. 128 bits that stand D bits before the end may be replaced by their product with x^D, taken
// modulo the CRC's polynomial: so a message is folded onto its last 128 bits, 4 x 128 at a time, by multiplications
// without carries. What is left has the same remainder as the message, and goes through the table like any 16 bytes.
// V. Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction, Intel 2009, section 3.
#include "checksum.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// The CRC's polynomial without x^32; bit 31 is the coefficient of x^0.
constexpr uint32_t POLYNOMIAL = 0xEDB88320;

// A polynomial below x^32 times x, modulo the CRC's.
constexpr uint32_t times_x(uint32_t value) { return (value >> 1) ^ (value & 1 ? POLYNOMIAL : 0); }

struct Table {
    uint32_t of_byte[256] = {};

    constexpr Table() {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t value = byte;
            for (int bit = 0; bit < 8; bit++) value = times_x(value);
            of_byte[byte] = value;
        }
    }
};

constexpr Table TABLE;

// Here and below `state` is the crc with all bits inverted, as it is while bytes go in.
uint32_t by_table(uint32_t state, const uint8_t* data, int64_t nbytes) {
    for (; nbytes > 0; nbytes--) state = (state >> 8) ^ TABLE.of_byte[(state ^ *data++) & 0xFF];
    return state;
}

#if defined(__x86_64__)

// x^n modulo the CRC's polynomial, as a factor: a product of bit-reversed factors stands one bit too low.
constexpr long long power_of_x(int n) {
    uint32_t value = 0x80000000;
    for (int i = 0; i < n; i++) value = times_x(value);
    return (long long)value << 1;
}

static_assert(power_of_x(4 * 128 + 32) == 0x154442BD4 && power_of_x(128 - 32) == 0x0CCAA009E, "Gopal et al., table 1");

__attribute__((target("pclmul,sse2"))) inline __m128i load(const uint8_t* data) {
    return _mm_loadu_si128((const __m128i*)data);
}

// `value` moved by the distance that `factors` are for, onto `next`.
__attribute__((target("pclmul,sse2"))) inline __m128i folded(__m128i value, __m128i factors, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(value, factors, 0x00);
    const __m128i high = _mm_clmulepi64_si128(value, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// The crc of what is left: four times 128 bits, and `data` to `end`.
__attribute__((target("pclmul,sse2"))) uint32_t finished(__m128i* lanes, const uint8_t* data, const uint8_t* end) {
    const __m128i by_512 = _mm_set_epi64x(power_of_x(512 - 32), power_of_x(512 + 32));
    const __m128i by_128 = _mm_set_epi64x(power_of_x(128 - 32), power_of_x(128 + 32));
    for (; end - data >= 64; data += 64)
        for (int i = 0; i < 4; i++) lanes[i] = folded(lanes[i], by_512, load(data + 16 * i));
    __m128i last = lanes[0];
    for (int i = 1; i < 4; i++) last = folded(last, by_128, lanes[i]);
    for (; end - data >= 16; data += 16) last = folded(last, by_128, load(data));
    uint8_t rest[16];
    memcpy(rest, &last, sizeof rest);
    return by_table(by_table(0, rest, sizeof rest), data, end - data);
}

__attribute__((target("pclmul,sse2"))) uint32_t by_folding(uint32_t state, const uint8_t* data, int64_t nbytes) {
    __m128i lanes[4];
    for (int i = 0; i < 4; i++) lanes[i] = load(data + 16 * i);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)state));
    return finished(lanes, data + 64, data + nbytes);
}

#define WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul")))

WIDE inline __m512i load_wide(const uint8_t* data) { return _mm512_loadu_si512((const void*)data); }

WIDE inline __m512i of_pairs(long long high, long long low) { return _mm512_set4_epi64(high, low, high, low); }

WIDE inline __m512i folded_wide(__m512i value, __m512i factors, __m512i next) {
    const __m512i low = _mm512_clmulepi64_epi128(value, factors, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(value, factors, 0x11);
    return _mm512_xor_si512(_mm512_xor_si512(low, high), next);
}

// Four times 512 bits at a time, of at least WIDE_NBYTES.
constexpr int64_t WIDE_NBYTES = 256;

WIDE uint32_t by_wide_folding(uint32_t state, const uint8_t* data, int64_t nbytes) {
    const __m512i by_2048 = of_pairs(power_of_x(2048 - 32), power_of_x(2048 + 32));
    const __m512i by_512 = of_pairs(power_of_x(512 - 32), power_of_x(512 + 32));
    __m512i lanes[4];
    for (int i = 0; i < 4; i++) lanes[i] = load_wide(data + 64 * i);
    lanes[0] = _mm512_xor_si512(lanes[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    const uint8_t* const end = data + nbytes;
    for (data += WIDE_NBYTES; end - data >= WIDE_NBYTES; data += WIDE_NBYTES)
        for (int i = 0; i < 4; i++) lanes[i] = folded_wide(lanes[i], by_2048, load_wide(data + 64 * i));
    __m512i last = lanes[0];
    for (int i = 1; i < 4; i++) last = folded_wide(last, by_512, lanes[i]);
    __m128i rest[4];
    memcpy(rest, &last, sizeof rest);
    return finished(rest, data, end);
}

bool has_wide_instructions() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}

bool has_instructions() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("pclmul");
}

#else

uint32_t by_folding(uint32_t state, const uint8_t* data, int64_t nbytes) { return by_table(state, data, nbytes); }

bool has_instructions() { return false; }

constexpr int64_t WIDE_NBYTES = 256;

uint32_t by_wide_folding(uint32_t state, const uint8_t* data, int64_t nbytes) { return by_table(state, data, nbytes); }

bool has_wide_instructions() { return false; }

#endif

}  // namespace

int32_t pa_crc32_is_fast(void) { return has_instructions(); }

uint32_t pa_crc32(uint32_t crc, const void* data, int64_t nbytes) {
    const uint8_t* const bytes = (const uint8_t*)data;
    if (nbytes >= WIDE_NBYTES && has_wide_instructions()) return ~by_wide_folding(~crc, bytes, nbytes);
    const bool folds = nbytes >= 64 && has_instructions();
    return ~(folds ? by_folding(~crc, bytes, nbytes) : by_table(~crc, bytes, nbytes));
}
