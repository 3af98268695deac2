// The C ABI of transfers between memory and files in the background, which Python calls by ctypes
// (polyaccel/offload/transfers.py).
#pragma once

#include "../kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pa_files pa_files;

// `threads` threads that wait for transfers; null when not one can be started. Any of the functions below may be called
// from several threads at once, except for pa_files_close, which finishes every transfer, ends the threads and frees all.
// A child of fork has none of the threads and may call none of them.
PA_EXPORT pa_files* pa_files_open(int32_t threads);
PA_EXPORT void pa_files_close(pa_files* files);

// Asks for `nbytes` bytes at `offset` of the file `path` to be read into `data`, or written from it, and returns the
// transfer's handle, or 0 without memory for it. `data` stays the caller's and has to stay where it is until the wait;
// `path` is copied. Files are neither made nor lengthened by a read, and not cut short by a write.
PA_EXPORT int64_t pa_files_start(pa_files* files, int32_t writes, const char* path, int64_t offset, void* data,
                                 int64_t nbytes);

// Whether a wait would return at once.
PA_EXPORT int32_t pa_files_is_done(pa_files* files, int64_t handle);

// Waits for a transfer and forgets it. Returns how many bytes were moved, fewer than were asked for where a file ended,
// or minus an errno; -EINVAL for a handle that is not known.
PA_EXPORT int64_t pa_files_wait(pa_files* files, int64_t handle);

#ifdef __cplusplus
}
#endif
