// The C ABI of collectives through shared memory, which Python calls by ctypes (polyaccel/comm/backends/shm/library.py).
//
// Processes of one host share a control block (see group.h). Python makes the memory and finds the peers; what is
// here moves and adds bytes. Buffers need the alignment of their element type. Functions return a pa_shm_status.
#pragma once

#include "../kernels/kernels.h"

enum pa_shm_op {
    PA_SHM_BARRIER,
    PA_SHM_ALL_REDUCE,
    PA_SHM_REDUCE_SCATTER,
    PA_SHM_ALL_GATHER,
    PA_SHM_BROADCAST,
    PA_SHM_ALL_TO_ALL,
    PA_SHM_GATHER,
    PA_SHM_SCATTER,
    PA_SHM_OP_COUNT
};

enum pa_shm_reduce { PA_SHM_SUM, PA_SHM_MAX, PA_SHM_MIN, PA_SHM_PROD, PA_SHM_AVG, PA_SHM_REDUCE_COUNT };

enum pa_shm_status {
    PA_SHM_OK,
    PA_SHM_TIMEOUT,    // ranks did not come in time
    PA_SHM_DEAD,       // the processes of ranks have ended
    PA_SHM_LEFT,       // ranks have closed the group or given up on an earlier call
    PA_SHM_MISMATCH,   // a rank calls something else
    PA_SHM_BROKEN,     // an earlier call of this rank failed
    PA_SHM_NO_MEMORY,  // a peer's memory cannot be mapped
    PA_SHM_BAD_CALL,
    PA_SHM_INTERRUPTED  // a signal handler of Python's raised, and its exception is set
};

enum { PA_SHM_MOST_RANKS = 256 };

// What ranks must agree on in a call, and where this rank's buffer lies when the peers can map it.
typedef struct {
    int32_t op, type, reduce, root;
    int64_t numel;  // of the buffer that is whole on every rank; 0 in an all-to-all of uneven parts
    int32_t is_shared;      // all ranks' buffers are the same memory
    uint32_t parts;         // a checksum of uneven parts that all ranks know; 0 where parts are equal
    int64_t most;  // elements of the longest part that this rank sends in an all-to-all; need not agree
    int64_t base, length;  // the allocation in this rank's heap file that holds the buffer; length 0: none does
    int64_t delta;         // the buffer's first byte within it
} pa_shm_told;

typedef struct {
    pa_shm_told told;
    const void* in;
    void* out;
    int64_t timeout_ns;
    int64_t spin_ns;   // how long to look before sleeping
    int32_t heeds_signals, unused;  // a waiting call runs Python's signal handlers, and ends when one of them raises
    // Where uneven parts begin, in elements, and where the last one ends: of the whole buffer, and in an all-to-all of
    // what is sent. Null where parts are equal.
    const int64_t* bounds;
    const int64_t* in_bounds;
    // Of an all-to-all of uneven parts, whose parts on one side stand in pieces: `piece_count` pairs (first element,
    // elements) for each rank, of `in` if `cuts_in`, else of `out`. Null where parts are whole.
    const int64_t* pieces;
    int64_t piece_count;
    int32_t cuts_in, unused_too;
} pa_shm_call;

// What of Python's C API calls need that hold its lock when they begin: PyEval_SaveThread, PyEval_RestoreThread and
// PyErr_CheckSignals. All null where there is no Python.
typedef struct {
    void* (*release)(void);
    void (*take)(void*);
    int (*check_signals)(void);
} pa_shm_python;

typedef struct pa_shm_group pa_shm_group;

#ifdef __cplusplus
extern "C" {
#endif

// To be called before the first collective or message, which from then on expect the caller to hold Python's lock.
// They release it while they run.
PA_EXPORT void pa_shm_set_python(const pa_shm_python* python);

// Bytes of a control block.
PA_EXPORT int64_t pa_shm_control_nbytes(int32_t world);

// Join the group of `control`, zeroed memory that all ranks map. `pids`, `starts` and `heaps` are each rank's process
// id, start time (field 22 of /proc/PID/stat) and the descriptor of its heap file here. NULL without memory.
PA_EXPORT pa_shm_group* pa_shm_open(void* control, int32_t rank, int32_t world, const int32_t* pids,
                                    const uint64_t* starts, const int32_t* heaps);

// Say that this rank takes part no more. The group's memory may be unmapped after pa_shm_free.
PA_EXPORT void pa_shm_leave(pa_shm_group* group);
PA_EXPORT void pa_shm_free(pa_shm_group* group);

// One collective. On PA_SHM_TIMEOUT, PA_SHM_DEAD, PA_SHM_LEFT and PA_SHM_MISMATCH, missing[i] is 1 for the ranks
// concerned, and after a mismatch `theirs` is what the first of them called.
PA_EXPORT int32_t pa_shm_collective(pa_shm_group* group, const pa_shm_call* call, uint8_t* missing,
                                    pa_shm_told* theirs);

// One message of `numel` elements of `type` to or from `peer`; in order per pair and direction.
PA_EXPORT int32_t pa_shm_send(pa_shm_group* group, int32_t peer, const pa_shm_call* call, uint8_t* missing);
PA_EXPORT int32_t pa_shm_recv(pa_shm_group* group, int32_t peer, const pa_shm_call* call, uint8_t* missing,
                              pa_shm_told* theirs);

// Map bytes of a file; NULL when that cannot be. And undo it, giving the pages back to the system when `frees` is set.
PA_EXPORT void* pa_shm_map(int32_t file, int64_t offset, int64_t nbytes);
PA_EXPORT void pa_shm_unmap(void* address, int32_t file, int64_t offset, int64_t nbytes, int32_t frees);

// Whether the process that started then still runs (a zombie does not).
PA_EXPORT int32_t pa_shm_is_alive(int32_t pid, uint64_t start);

#ifdef __cplusplus
}
#endif
