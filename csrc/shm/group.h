// The control block of a group of ranks, and how they wait for one another in it.
//
// [Note: Double-buffered collective steps]
// A collective is a series of steps. In each, a rank fills its stage, says that it has arrived by counting up one word,
// waits until every peer has counted as far, and reads the peers' stages. The stage is double: what was read in one step
// is written again two steps later at the earliest, and a rank arrives at the step in between only when it has done
// reading. So one wait a step suffices, and none is needed between one collective and the next.
#pragma once

#include <atomic>
#include <unordered_map>

#include "shm.h"

// Where the others look. Each word has a cache line, lest a poll disturbs the writer of another.
struct alignas(64) ShmWord {
    std::atomic<uint32_t> count{0};
    std::atomic<uint32_t> sleepers{0};
    std::atomic<int32_t> core{0};  // where the writer last counted
};

struct alignas(64) ShmSeat {
    ShmWord arrived;
    std::atomic<uint32_t> has_left{0};
    alignas(64) pa_shm_told told[2];
};

enum : int64_t {
    SHM_STAGE = 1 << 20,     // bytes, twice a rank: several ranks' stages fit into the cache that cores share
    SHM_PACKET = 32 << 10,   // bytes of a message at a time
    SHM_PACKETS = 2
};

struct ShmPacket {
    int64_t numel;
    int32_t type, unused;
    alignas(64) char data[SHM_PACKET];
};

// Messages from one rank to another.
struct ShmChannel {
    ShmWord sent, taken;
    ShmPacket packets[SHM_PACKETS];
};

// In memory: world seats, world pairs of stages, world * world channels (sender major).
struct ShmBlock {
    ShmSeat* seats;
    char* stages;
    ShmChannel* channels;
};

struct ShmMapping {
    char* address;
    int64_t length;
};

struct ShmPeer {
    int32_t pid, heap;
    uint64_t start;
    std::unordered_map<int64_t, ShmMapping> mapped;  // by the allocation's place in the heap file

    void forget();
};

struct pa_shm_group {
    int32_t rank, world;
    ShmBlock block;
    ShmPeer* peers;
    uint32_t epoch;
    std::atomic<bool> is_broken;  // messages have their own threads

    char* stage(int32_t of, uint32_t at) const { return block.stages + (2 * of + (at & 1)) * SHM_STAGE; }
    ShmChannel& channel(int32_t from, int32_t to) const { return block.channels[from * world + to]; }
    // Where `told` by `of` lies in this process; nullptr when it cannot be mapped.
    char* memory(int32_t of, const pa_shm_told& told);
};

// How long a call may wait, and what it found.
struct ShmPatience {
    int64_t deadline_ns;
    int64_t spin_ns;
    uint8_t* missing;
    bool heeds_signals;
};

ShmPatience shm_patience(const pa_shm_call* call, uint8_t* missing);

// Release Python's lock, where there is one, and take it again.
void shm_release_python();
void shm_take_python();

// Count `word` up to `to` and wake all that sleep on it.
void shm_count(ShmWord& word, uint32_t to);

// Return PA_SHM_OK once `word`, which `peer` counts, is `target` or beyond. In a step (`is_step`) every rank behind
// `target` is among the missing, else only `peer`. Python's lock must be free.
int32_t shm_wait(const pa_shm_group* group, ShmWord& word, uint32_t target, const ShmPatience& patience, int32_t peer,
                 bool is_step);

// Arrive at the next step and wait for everybody.
int32_t shm_step(pa_shm_group* group, const ShmPatience& patience);
