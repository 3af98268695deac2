#include "move.h"

#include <string.h>

#include "../kernels/numbers.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace {

enum { BLOCK = 1024 };  // elements: sums stay in the first cache

void widen_to(float* to, const char* from, int32_t type, int64_t numel) {
    if (type == PA_FLOAT32)
        memcpy(to, from, numel * sizeof *to);
    else if (type == PA_BFLOAT16)
        widen_bfloat16(to, reinterpret_cast<const uint16_t*>(from), numel);
    else
        widen_float16(to, reinterpret_cast<const uint16_t*>(from), numel);
}

// The reduced block as bytes of its own type, in `total` or `narrow`. `count` is at least 2.
const char* reduce_floats(const isa_kernels* isa, int32_t type, int32_t reduce, int64_t numel,
                          const char* const* parts, int32_t count, int64_t offset, float* total, uint16_t* narrow) {
    const bool is_wide = type == PA_FLOAT32, averages = reduce == PA_SHM_AVG;
    const pa_array nowhere = {nullptr, PA_FLOAT32}, rounded = is_wide ? nowhere : pa_array{narrow, type};
    widen_to(total, parts[0] + offset, type, numel);
    const int32_t kind = averages ? PA_SUM : PA_SUM + reduce;
    for (int32_t i = 1; i < count; i++) {
        const pa_array arrays[2] = {{total, PA_FLOAT32}, {const_cast<char*>(parts[i]) + offset, type}};
        isa->sweep(kind, arrays, i + 1 == count && !averages ? rounded : nowhere, nullptr, nullptr, 0, numel);
    }
    if (averages) {
        const pa_array arrays[1] = {{total, PA_FLOAT32}};
        const float share = static_cast<float>(1.0 / count);
        isa->sweep(PA_SCALE, arrays, rounded, &share, nullptr, 0, numel);
    }
    return is_wide ? reinterpret_cast<char*>(total) : reinterpret_cast<char*>(narrow);
}

const char* reduce_others(const isa_kernels* isa, int32_t type, int32_t reduce, int64_t numel,
                          const char* const* parts, int32_t count, int64_t offset, double* total) {
    memcpy(total, parts[0] + offset, numel * itemsize_of(type));
    const int32_t kind = reduce == PA_SHM_AVG ? PA_SUM : PA_SUM + reduce;
    for (int32_t i = 1; i < count; i++) isa->combine_any(kind, type, total, parts[i] + offset, numel);
    if (reduce == PA_SHM_AVG)
        for (int64_t i = 0; i < numel; i++) total[i] *= 1.0 / count;
    return reinterpret_cast<char*>(total);
}

}  // namespace

void shm_fence(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

void shm_copy(void* to, const void* from, int64_t nbytes, [[maybe_unused]] bool streams) {
    if (to == from || nbytes == 0) return;
#if defined(__x86_64__)
    if (streams && nbytes >= 256) {
        char* target = static_cast<char*>(to);
        const char* source = static_cast<const char*>(from);
        const int64_t head = -reinterpret_cast<intptr_t>(target) & 63;
        memcpy(target, source, head);
        target += head, source += head, nbytes -= head;
        for (; nbytes >= 64; target += 64, source += 64, nbytes -= 64) {
            const auto* const line = reinterpret_cast<const __m128i*>(source);
            const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
            const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
            auto* const place = reinterpret_cast<__m128i*>(target);
            _mm_stream_si128(place, a);
            _mm_stream_si128(place + 1, b);
            _mm_stream_si128(place + 2, c);
            _mm_stream_si128(place + 3, d);
        }
        memcpy(target, source, nbytes);
        return;
    }
#endif
    memcpy(to, from, nbytes);
}

void shm_reduce(int32_t type, int32_t reduce, int64_t numel, const char* const* parts, int32_t count, char* const* out,
                int32_t out_count, bool streams) {
    alignas(64) double total[BLOCK];
    alignas(64) uint16_t narrow[BLOCK];
    const isa_kernels* const isa = isa_current();
    const bool is_float = type == PA_FLOAT32 || type == PA_BFLOAT16 || type == PA_FLOAT16;
    for (int64_t start = 0; start < numel; start += BLOCK) {
        const int64_t some = smaller(BLOCK, numel - start), offset = start * itemsize_of(type);
        const char* const result =
            is_float ? reduce_floats(isa, type, reduce, some, parts, count, offset,
                                     reinterpret_cast<float*>(total), narrow)
                     : reduce_others(isa, type, reduce, some, parts, count, offset, total);
        for (int32_t i = 0; i < out_count; i++) shm_copy(out[i] + offset, result, some * itemsize_of(type), streams);
    }
}
