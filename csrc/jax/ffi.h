// Calls out of a program that XLA compiled, back into this process (polyaccel/jax/program/calls.py).
#pragma once

#include "../kernels/kernels.h"
#include "xla_ffi.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PA_JAX_MESSAGE_NBYTES = 4096 };

// What a call runs: `tag` is the attribute that the program was traced with; addresses of the operands and the results;
// where to write why it failed, ended by a zero. Returns 0, or anything else for a failure.
typedef int32_t (*pa_jax_callback)(int64_t tag, void** operands, void** results, char* message);

// Set before the first program runs, and never again.
PA_EXPORT void pa_jax_set_callback(pa_jax_callback callback);

// The handler that XLA calls. Null, or an error with the callback's message, which ends the program.
PA_EXPORT xla_ffi_error* pa_jax_handler(xla_ffi_frame* frame);

#ifdef __cplusplus
}
#endif
