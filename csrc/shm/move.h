// Copies and reductions of one rank, for collectives.cpp.
#pragma once

#include "../kernels/isa.h"
#include "shm.h"

// `streams`: past the caches, for what is larger than they are and not read again soon.
void shm_copy(void* to, const void* from, int64_t nbytes, bool streams);

// out[t][i] = op over the `count` parts, in their order, for `numel` elements of `type`, into each of `out_count` places.
// 16-bit floats are added in float32 and rounded once. Parts may be among the places.
void shm_reduce(int32_t type, int32_t reduce, int64_t numel, const char* const* parts, int32_t count, char* const* out,
                int32_t out_count, bool streams);

// Make streamed bytes visible before the next store.
void shm_fence(void);
