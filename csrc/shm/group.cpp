#include "group.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/falloc.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

enum : int64_t { ALONE_NS = 2000, SHORTEST_SLEEP_NS = 1000000, LONGEST_SLEEP_NS = 50000000 };
enum { LOOKS = 32, MOST_MAPPINGS = 1024 };

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

bool has_reached(const ShmWord& word, uint32_t target) {
    return static_cast<int32_t>(word.count.load(std::memory_order_acquire) - target) >= 0;
}

void sleep_on(ShmWord& word, uint32_t target, int64_t nanoseconds) {
    word.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = word.count.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - target) < 0) {
        const timespec limit{nanoseconds / 1000000000, nanoseconds % 1000000000};
        // Comes back on a wake, at the limit, on a signal, or at once when the word has changed: all the same to the caller.
        syscall(SYS_futex, &word.count, FUTEX_WAIT, seen, &limit, nullptr, 0);
    }
    word.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

pa_shm_python python;
thread_local void* released;  // what `release` gave, for `take`

bool is_interrupted() {
    if (!python.check_signals) return false;
    shm_take_python();
    const bool has_raised = python.check_signals() != 0;
    shm_release_python();
    return has_raised;
}

int64_t stages_offset(int32_t world) { return static_cast<int64_t>(sizeof(ShmSeat)) * world; }
int64_t channels_offset(int32_t world) { return stages_offset(world) + 2 * SHM_STAGE * world; }

// Fill `missing` with the ranks that are waited for and return why they do not come; PA_SHM_OK if they still may.
// `is_late`: time is up.
int32_t find_missing(const pa_shm_group* group, uint32_t target, const ShmPatience& patience, int32_t peer,
                     bool is_step, bool is_late) {
    bool late[PA_SHM_MOST_RANKS], dead[PA_SHM_MOST_RANKS], left[PA_SHM_MOST_RANKS];
    bool any_dead = false, any_left = false;
    const auto is_awaited = [&](int32_t i) {
        return i != group->rank && (is_step ? !has_reached(group->block.seats[i].arrived, target) : i == peer);
    };
    for (int32_t i = 0; i < group->world; i++) {
        late[i] = is_awaited(i);
        // A rank counts first and leaves or ends afterwards: once it has gone, its count is final.
        left[i] = late[i] && group->block.seats[i].has_left.load(std::memory_order_acquire) && is_awaited(i);
        any_left |= left[i];
    }
    // Only now: a peer that left because another one had ended must not be seen without that one.
    for (int32_t i = 0; i < group->world; i++) {
        dead[i] = late[i] && !pa_shm_is_alive(group->peers[i].pid, group->peers[i].start) && is_awaited(i);
        any_dead |= dead[i];
    }
    const bool* const found = any_dead ? dead : any_left ? left : late;
    if (!any_dead && !any_left && !is_late) return PA_SHM_OK;
    for (int32_t i = 0; i < group->world; i++) patience.missing[i] = found[i];
    return any_dead ? PA_SHM_DEAD : any_left ? PA_SHM_LEFT : PA_SHM_TIMEOUT;
}

}  // namespace

ShmPatience shm_patience(const pa_shm_call* call, uint8_t* missing) {
    return {now_ns() + call->timeout_ns, call->spin_ns, missing, call->heeds_signals != 0};
}

void pa_shm_set_python(const pa_shm_python* given) { python = *given; }

void shm_release_python() {
    if (python.release) released = python.release();
}

void shm_take_python() {
    if (python.take) python.take(released);
}

void shm_count(ShmWord& word, uint32_t to) {
    word.core.store(sched_getcpu(), std::memory_order_relaxed);
    word.count.store(to, std::memory_order_seq_cst);
    if (word.sleepers.load(std::memory_order_seq_cst))
        syscall(SYS_futex, &word.count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

int32_t shm_wait(const pa_shm_group* group, ShmWord& word, uint32_t target, const ShmPatience& patience, int32_t peer,
                 bool is_step) {
    if (has_reached(word, target)) return PA_SHM_OK;
    const int64_t began = now_ns();
    for (int64_t spent = 0; spent < patience.spin_ns; spent = now_ns() - began) {
        // The peer may be waiting for this very core: a wake-up tends to bring ranks together.
        if (spent > ALONE_NS || word.core.load(std::memory_order_relaxed) == sched_getcpu()) sched_yield();
        for (int32_t i = 0; i < LOOKS; i++) {
            if (has_reached(word, target)) return PA_SHM_OK;
            relax();
        }
    }
    for (int64_t nap = SHORTEST_SLEEP_NS; !has_reached(word, target); nap = nap * 2) {
        if (nap > LONGEST_SLEEP_NS) nap = LONGEST_SLEEP_NS;
        const int64_t left_ns = patience.deadline_ns - now_ns();
        if (left_ns > 0) sleep_on(word, target, nap < left_ns ? nap : left_ns);
        if (has_reached(word, target)) break;
        if (patience.heeds_signals && is_interrupted()) return PA_SHM_INTERRUPTED;
        const int32_t status = find_missing(group, target, patience, peer, is_step, left_ns <= 0);
        if (status == PA_SHM_OK) continue;
        if (!has_reached(word, target)) return status;
        // It came after all; any other missing peer is found when its turn comes.
        memset(patience.missing, 0, group->world);
    }
    return PA_SHM_OK;
}

int32_t shm_step(pa_shm_group* group, const ShmPatience& patience) {
    const uint32_t epoch = ++group->epoch;
    shm_count(group->block.seats[group->rank].arrived, epoch);
    for (int32_t i = 1; i < group->world; i++) {
        const int32_t peer = (group->rank + i) % group->world;
        const int32_t status = shm_wait(group, group->block.seats[peer].arrived, epoch, patience, peer, true);
        if (status != PA_SHM_OK) return status;
    }
    return PA_SHM_OK;
}

void ShmPeer::forget() {
    for (const auto& entry : mapped) munmap(entry.second.address, entry.second.length);
    mapped.clear();
}

char* pa_shm_group::memory(int32_t of, const pa_shm_told& told) {
    ShmPeer& peer = peers[of];
    const auto known = peer.mapped.find(told.base);
    if (known != peer.mapped.end()) return known->second.address + told.delta;
    // Most are of buffers that are gone; and of this peer no other is in use.
    if (peer.mapped.size() >= MOST_MAPPINGS) peer.forget();
    void* const address = pa_shm_map(peer.heap, told.base, told.length);
    if (!address) return nullptr;
    peer.mapped[told.base] = {static_cast<char*>(address), told.length};
    return static_cast<char*>(address) + told.delta;
}

int64_t pa_shm_control_nbytes(int32_t world) {
    return channels_offset(world) + static_cast<int64_t>(sizeof(ShmChannel)) * world * world;
}

pa_shm_group* pa_shm_open(void* control, int32_t rank, int32_t world, const int32_t* pids, const uint64_t* starts,
                          const int32_t* heaps) {
    if (world < 1 || world > PA_SHM_MOST_RANKS || rank < 0 || rank >= world) return nullptr;
    char* const start = static_cast<char*>(control);
    const ShmBlock block{reinterpret_cast<ShmSeat*>(start), start + stages_offset(world),
                         reinterpret_cast<ShmChannel*>(start + channels_offset(world))};
    auto* const group = new (std::nothrow) pa_shm_group{rank, world, block, new (std::nothrow) ShmPeer[world], 0, {false}};
    if (!group || !group->peers) return nullptr;
    for (int32_t i = 0; i < world; i++) {
        group->peers[i].pid = pids[i];
        group->peers[i].heap = heaps[i];
        group->peers[i].start = starts[i];
    }
    return group;
}

void pa_shm_leave(pa_shm_group* group) {
    ShmSeat& seat = group->block.seats[group->rank];
    seat.has_left.store(1, std::memory_order_release);
    syscall(SYS_futex, &seat.arrived.count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void pa_shm_free(pa_shm_group* group) {
    for (int32_t i = 0; i < group->world; i++) group->peers[i].forget();
    delete[] group->peers;
    delete group;
}

void* pa_shm_map(int32_t file, int64_t offset, int64_t nbytes) {
    void* const address = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, offset);
    if (address == MAP_FAILED) return nullptr;
    madvise(address, nbytes, MADV_HUGEPAGE);  // where the system has them for shared memory
    return address;
}

void pa_shm_unmap(void* address, int32_t file, int64_t offset, int64_t nbytes, int32_t frees) {
    munmap(address, nbytes);
    if (frees) fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, nbytes);
}

int32_t pa_shm_is_alive(int32_t pid, uint64_t start) {
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return errno != ENOENT && errno != ESRCH;
    const ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return 0;
    text[length] = 0;
    // The name in parentheses may hold anything, also parentheses.
    const char* const rest = strrchr(text, ')');
    char state = 0;
    unsigned long long started = 0;
    if (!rest || sscanf(rest + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                        &state, &started) != 2)
        return 1;
    return state != 'Z' && state != 'X' && started == start;
}
