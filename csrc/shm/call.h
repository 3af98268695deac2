// A collective as it runs on this rank, for collectives.cpp and pieces.cpp.
#pragma once

#include "group.h"
#include "move.h"

enum : int64_t {
    CUT = 64,             // pieces start on cache lines
    STREAMED = 8 << 20    // from here copies are written past the caches
};

inline void copy(char* to, const char* from, int64_t nbytes) { shm_copy(to, from, nbytes, false); }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t cut_down(int64_t nbytes) { return nbytes / CUT * CUT; }
inline int64_t cut_up(int64_t nbytes) { return (nbytes + CUT - 1) / CUT * CUT; }

// The next `room` bytes of a part at most; none behind its end.
inline int64_t some_of(int64_t length, int64_t start, int64_t room) {
    return start < length ? least(room, length - start) : 0;
}

// Each rank's part of a buffer that is whole: equal, or as `bounds` say.
struct Parts {
    const int64_t* bounds;
    int64_t itemsize, equal;  // bytes

    Parts(const int64_t* bounds, int64_t itemsize, int64_t nbytes, int32_t world)
        : bounds(bounds), itemsize(itemsize), equal(nbytes / world) {}
    int64_t from(int32_t rank) const { return bounds ? bounds[rank] * itemsize : rank * equal; }
    int64_t length(int32_t rank) const { return from(rank + 1) - from(rank); }
    int64_t longest(int32_t world) const {
        int64_t most = 0;
        for (int32_t i = 0; i < world; i++) most = length(i) > most ? length(i) : most;
        return most;
    }
};

struct Call {
    pa_shm_group* group;
    const pa_shm_call* call;
    ShmPatience patience;
    int64_t itemsize, nbytes;
    bool streams;

    int32_t rank() const { return group->rank; }
    int32_t world() const { return group->world; }
    const char* in() const { return static_cast<const char*>(call->in); }
    char* out() const { return static_cast<char*>(call->out); }
    int32_t step() const { return shm_step(group, patience); }
    char* own_stage() const { return group->stage(group->rank, group->epoch + 1); }  // to be read after the next step
    char* read_stage(int32_t of) const { return group->stage(of, group->epoch); }
    Parts parts() const { return Parts(call->bounds, itemsize, nbytes, world()); }
    Parts in_parts() const { return Parts(call->in_bounds, itemsize, nbytes, world()); }
    // The peers one by one, each rank beginning with its successor.
    int32_t peer(int32_t i) const { return (group->rank + i) % group->world; }
    void reduce(int64_t piece, const char* const* parts, char* const* outs, int32_t out_count) const {
        shm_reduce(call->told.type, call->told.reduce, piece / itemsize, parts, group->world, outs, out_count, streams);
    }
};

inline bool is_agreed(const pa_shm_told& a, const pa_shm_told& b) {
    return a.op == b.op && a.type == b.type && a.reduce == b.reduce && a.root == b.root && a.numel == b.numel &&
           a.is_shared == b.is_shared && a.parts == b.parts;
}

// Publish what this rank calls, to be checked after the next step.
inline void tell(const Call& c) { c.group->block.seats[c.rank()].told[(c.group->epoch + 1) & 1] = c.call->told; }

inline const pa_shm_told& told_by(const Call& c, int32_t peer, uint32_t epoch) {
    return c.group->block.seats[peer].told[epoch & 1];
}

inline int32_t check_told(const Call& c, pa_shm_told* theirs) {
    int32_t status = PA_SHM_OK;
    for (int32_t i = 0; i < c.world(); i++) {
        const pa_shm_told& told = told_by(c, i, c.group->epoch);
        if (is_agreed(told, c.call->told)) continue;
        if (status == PA_SHM_OK) *theirs = told;
        c.patience.missing[i] = 1;
        status = PA_SHM_MISMATCH;
    }
    return status;
}

// The first step of a call, which also finds out whether all mean the same.
inline int32_t first_step(const Call& c, pa_shm_told* theirs) {
    tell(c);
    const int32_t status = c.step();
    return status != PA_SHM_OK ? status : check_told(c, theirs);
}

inline bool can_be_direct(const Call& c) {
    for (int32_t i = 0; i < c.world(); i++)
        if (told_by(c, i, c.group->epoch).length == 0) return false;
    return true;
}

// An all-to-all whose parts stand in pieces, `pa_shm_call.pieces`; and whether these are the parts, inside the buffer.
bool shm_are_pieces(const pa_shm_group* group, const pa_shm_call* call);
int32_t shm_exchange_pieces(const Call& c, pa_shm_told* theirs);
