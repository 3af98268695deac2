// The C ABI over oneCCL, which Python calls by ctypes (polyaccel/comm/backends/ccl/library.py). Host memory only.
//
// oneCCL is not safe to call from several threads, and its calls block until the peers come: all of them run one after
// another, in the order in which they were submitted, on one thread of this library. The submitter gets a job and
// waits for it as long as it likes.
#pragma once

#include <stdint.h>

#define PA_CCL_EXPORT __attribute__((visibility("default")))

// A change of anything below needs another number: what pip has compiled may be older than the Python that loads it.
#define PA_CCL_ABI_VERSION 2
#define PA_CCL_ADDRESS_NBYTES 256

enum pa_ccl_op {
    PA_CCL_BARRIER,
    PA_CCL_ALL_REDUCE,
    PA_CCL_REDUCE_SCATTER,
    PA_CCL_ALL_GATHER,
    PA_CCL_BROADCAST,
    PA_CCL_ALL_TO_ALL
};

enum pa_ccl_type {
    PA_CCL_FLOAT64,
    PA_CCL_FLOAT32,
    PA_CCL_BFLOAT16,
    PA_CCL_FLOAT16,
    PA_CCL_INT64,
    PA_CCL_INT32,
    PA_CCL_INT16,
    PA_CCL_INT8,
    PA_CCL_UINT8
};

enum pa_ccl_reduce { PA_CCL_SUM, PA_CCL_MAX, PA_CCL_MIN, PA_CCL_PROD };

enum pa_ccl_state { PA_CCL_DONE, PA_CCL_PENDING, PA_CCL_FAILED };

typedef struct pa_ccl_group pa_ccl_group;
typedef struct pa_ccl_job pa_ccl_job;

typedef struct {
    int32_t op, type, reduce, root;
    int64_t numel;  // of the buffer that is smaller: what this rank keeps, sends or has, see pa_ccl_collective
    const void* in;
    void* out;
} pa_ccl_call;

#ifdef __cplusplus
extern "C" {
#endif

PA_CCL_EXPORT int32_t pa_ccl_abi_version(void);

// "major.minor.update" of the headers that this was compiled with, and of the library that was loaded.
PA_CCL_EXPORT const char* pa_ccl_built_for(void);
PA_CCL_EXPORT const char* pa_ccl_loaded(void);

// End the process at once, with the code that it exits with, if a call is still under way then: oneCCL's own destructors
// would crash. To be called as late as possible, for what is asked for last happens first.
PA_CCL_EXPORT void pa_ccl_guard_exit(void);

PA_CCL_EXPORT pa_ccl_group* pa_ccl_new_group(void);

// Make a meeting place in this process and write its address (PA_CCL_ADDRESS_NBYTES bytes) for the other ranks.
PA_CCL_EXPORT pa_ccl_job* pa_ccl_host(pa_ccl_group* group, char* address);

// Join as `rank` of `world`: at the place that pa_ccl_host made in this group, or at `address` if it is not null.
PA_CCL_EXPORT pa_ccl_job* pa_ccl_join(pa_ccl_group* group, const char* address, int32_t rank, int32_t world);

// One collective. `numel` counts an all-reduce's or a broadcast's buffer, what a reduce-scatter leaves on each rank,
// what each rank brings to an all-gather, and what goes to each rank in an all-to-all.
PA_CCL_EXPORT pa_ccl_job* pa_ccl_collective(pa_ccl_group* group, const pa_ccl_call* call);

// Leave and free the group once what was submitted before has run.
PA_CCL_EXPORT pa_ccl_job* pa_ccl_leave(pa_ccl_group* group);

// A pa_ccl_state, after at most `timeout_ns`.
PA_CCL_EXPORT int32_t pa_ccl_wait(pa_ccl_job* job, int64_t timeout_ns);

// Why a job has failed; valid until it is freed.
PA_CCL_EXPORT const char* pa_ccl_error(pa_ccl_job* job);

// Forget a job, whether it has run or not.
PA_CCL_EXPORT void pa_ccl_free(pa_ccl_job* job);

#ifdef __cplusplus
}
#endif
