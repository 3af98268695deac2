#include "isa.h"

#include <string.h>

#include <atomic>

static bool runs_here(const isa_kernels* kernels) {
#if defined(__x86_64__)
    // Asks the operating system too, whether it saves the registers.
    __builtin_cpu_init();
    if (kernels == &ISA_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("f16c");
    if (kernels == &ISA_AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
    return kernels == &ISA_PORTABLE;
}

static const isa_kernels* const BEST_FIRST[] = {
#if defined(__x86_64__)
    &ISA_AVX512,
    &ISA_AVX2,
#endif
    &ISA_PORTABLE,
};

static std::atomic<const isa_kernels*> chosen{nullptr};

const isa_kernels* isa_current(void) {
    const isa_kernels* kernels = chosen.load(std::memory_order_acquire);
    if (kernels) return kernels;
    for (const isa_kernels* candidate : BEST_FIRST)
        if (runs_here(candidate)) {
            // Two threads may both come here, and choose the same.
            chosen.store(candidate, std::memory_order_release);
            return candidate;
        }
    return &ISA_PORTABLE;
}

const char* pa_isa(void) { return isa_current()->name; }

int32_t pa_choose_isa(const char* name) {
    for (const isa_kernels* candidate : BEST_FIRST)
        if (strcmp(candidate->name, name) == 0 && runs_here(candidate)) {
            chosen.store(candidate, std::memory_order_release);
            return 0;
        }
    return PA_BAD_KIND;
}
