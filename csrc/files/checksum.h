// The C ABI of checksums, which Python calls by ctypes (polyaccel/ops/native.py).
#pragma once

#include "../kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// Whether this processor has the instructions without which zlib's crc32 is the faster one.
PA_EXPORT int32_t pa_crc32_is_fast(void);

// zlib's crc32 of `nbytes` bytes, where `crc` is that of the bytes before them (0: there are none).
PA_EXPORT uint32_t pa_crc32(uint32_t crc, const void* data, int64_t nbytes);

#ifdef __cplusplus
}
#endif
