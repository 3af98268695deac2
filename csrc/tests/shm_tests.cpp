// What sanitizers watch of the collectives through shared memory: ranks are threads, so that the thread sanitizer sees
// both sides of every exchange. Each rank has its group, heap file and mappings, as processes have.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "../shm/shm.h"

namespace {

enum : int64_t { PAGE = 1 << 16 };

void expect(bool holds, const std::string& what) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
    std::exit(1);
}

uint64_t start_of_this_process() {
    std::ifstream file("/proc/self/stat");
    std::string text((std::istreambuf_iterator<char>(file)), {});
    std::istringstream rest(text.substr(text.rfind(')') + 2));
    std::string word;
    for (int i = 0; i < 20; i++) rest >> word;
    return std::stoull(word);
}

float value_of(int32_t rank, int64_t i) { return static_cast<float>((i * 7 + rank * 3) % 11); }

struct World {
    int32_t size;
    std::vector<int32_t> pids, heaps;
    std::vector<uint64_t> starts;
    std::vector<uint8_t> room;
    void* control;

    explicit World(int32_t size) : size(size), pids(size, getpid()), starts(size, start_of_this_process()) {
        for (int32_t i = 0; i < size; i++) {
            heaps.push_back(memfd_create("shm_tests", MFD_CLOEXEC));
            expect(ftruncate(heaps.back(), 256 * PAGE) == 0, "a heap file");
        }
        room.resize(static_cast<size_t>(pa_shm_control_nbytes(size)) + 64);
        control = room.data() + (-reinterpret_cast<uintptr_t>(room.data()) & 63);
    }
    ~World() {
        for (const int32_t heap : heaps) close(heap);
    }
};

// All-gather, reduce-scatter and all-to-all of parts that differ: rank i has `part` + i elements, rank 0 none. In the
// all-to-all rank i sends `part` * i + j elements to rank j.
void play_uneven(const World& world, int32_t rank, int64_t part, const std::function<void(pa_shm_call)>& run) {
    const int32_t n = world.size;
    std::vector<int64_t> bounds(n + 1), sent(n + 1), received(n + 1);
    for (int32_t i = 0; i < n; i++) {
        bounds[i + 1] = bounds[i] + (i == 0 ? 0 : part + i);
        sent[i + 1] = sent[i] + part * rank + i;
        received[i + 1] = received[i] + part * i + rank;
    }
    const auto sized = [](std::vector<float>& values, int64_t numel) { values.assign(static_cast<size_t>(numel), -1); };
    std::vector<float> whole, result, turned;
    pa_shm_call call{};
    call.told.type = PA_FLOAT32;
    call.told.numel = bounds[n];
    call.told.parts = 1;
    call.bounds = bounds.data();
    sized(whole, bounds[n]);
    for (int64_t i = 0; i < bounds[n]; i++) whole[i] = value_of(rank, i);

    sized(result, bounds[rank + 1] - bounds[rank]);
    call.told.op = PA_SHM_REDUCE_SCATTER;
    call.in = whole.data();
    call.out = result.data();
    run(call);
    for (int64_t i = bounds[rank]; i < bounds[rank + 1]; i++) {
        float total = 0;
        for (int32_t other = 0; other < n; other++) total += value_of(other, i);
        expect(result[i - bounds[rank]] == total, "uneven reduce-scatter");
    }

    call.told.op = PA_SHM_ALL_GATHER;
    sized(turned, bounds[n]);
    call.in = whole.data() + bounds[rank];
    call.out = turned.data();
    run(call);
    for (int32_t i = 0; i < n; i++)
        for (int64_t k = bounds[i]; k < bounds[i + 1]; k++) expect(turned[k] == value_of(i, k), "uneven all-gather");

    sized(whole, sent[n]);
    sized(turned, received[n]);
    for (int64_t i = 0; i < sent[n]; i++) whole[i] = value_of(rank, i);
    call.told.op = PA_SHM_ALL_TO_ALL;
    call.told.numel = 0;
    call.told.most = part * rank + n - 1;
    call.bounds = received.data();
    call.in_bounds = sent.data();
    call.in = whole.data();
    call.out = turned.data();
    run(call);
    for (int32_t i = 0; i < n; i++) {
        const int64_t theirs = rank * (part * i) + static_cast<int64_t>(rank) * (rank - 1) / 2;  // where my part begins
        for (int64_t k = received[i]; k < received[i + 1]; k++)
            expect(turned[k] == value_of(i, theirs + k - received[i]), "uneven all-to-all");
    }
}

// An all-to-all into pieces, and of those pieces back: rank i has `part` + i + j elements for rank j, in two pieces that
// arrive in the order of pieces, then of ranks.
void play_pieces(const World& world, int32_t rank, int64_t part, float* heap, pa_shm_call call,
                 const std::function<void(pa_shm_call)>& run) {
    const int32_t n = world.size;
    std::vector<int64_t> bounds(n + 1), pieces(4 * n);
    for (int32_t i = 0; i < n; i++) bounds[i + 1] = bounds[i] + part + i + rank;
    int64_t end = 0;
    for (int32_t piece = 0; piece < 2; piece++)
        for (int32_t i = 0; i < n; i++) {
            const int64_t all = bounds[i + 1] - bounds[i];
            pieces[4 * i + 2 * piece] = end;
            end += pieces[4 * i + 2 * piece + 1] = piece ? all - all / 3 : all / 3;
        }
    std::vector<float> own(bounds[n]), result(bounds[n], -1);
    float* const source = heap ? heap : own.data();
    for (int64_t i = 0; i < bounds[n]; i++) source[i] = value_of(rank, i);
    call.told.type = PA_FLOAT32;
    call.told.op = PA_SHM_ALL_TO_ALL;
    call.told.parts = 2;
    call.told.most = part + rank + n - 1;
    call.bounds = call.in_bounds = bounds.data();
    call.pieces = pieces.data();
    call.piece_count = 2;
    call.in = source;
    call.out = result.data();
    run(call);
    for (int32_t i = 0; i < n; i++) {
        int64_t k = (part + i) * rank + static_cast<int64_t>(rank) * (rank - 1) / 2;  // where my part begins
        for (int32_t piece = 0; piece < 2; piece++)
            for (int64_t at = 0; at < pieces[4 * i + 2 * piece + 1]; at++, k++)
                expect(result[pieces[4 * i + 2 * piece] + at] == value_of(i, k), "into pieces");
    }
    memcpy(source, result.data(), bounds[n] * sizeof(float));
    call.cuts_in = 1;
    run(call);
    for (int64_t i = 0; i < bounds[n]; i++) expect(result[i] == value_of(rank, i), "of pieces");
}

// One rank's run through kinds and sizes, through stages and directly.
void play(World& world, int32_t rank) {
    const int32_t n = world.size;
    pa_shm_group* const group =
        pa_shm_open(world.control, rank, n, world.pids.data(), world.starts.data(), world.heaps.data());
    expect(group != nullptr, "pa_shm_open");
    std::vector<uint8_t> missing(n);
    pa_shm_told theirs{};
    const auto run = [&](pa_shm_call call) {
        call.timeout_ns = 60000000000;
        call.spin_ns = 1000;
        const int32_t status = pa_shm_collective(group, &call, missing.data(), &theirs);
        expect(status == PA_SHM_OK, "status " + std::to_string(status) + " of op " + std::to_string(call.told.op));
    };
    const int64_t length = 128 * PAGE;
    char* const heap = static_cast<char*>(pa_shm_map(world.heaps[rank], PAGE, length));
    expect(heap != nullptr, "pa_shm_map");
    for (const int64_t part : {0, 1, 7, 4000, 60001, 300007}) {
        play_uneven(world, rank, part, run);
        for (const bool is_direct : {false, true}) {
            const int64_t numel = part * n;
            std::vector<float> own(numel), result(part);
            float* const whole = is_direct ? reinterpret_cast<float*>(heap + 64) : own.data();
            const auto fill = [&] {
                for (int64_t i = 0; i < numel; i++) whole[i] = value_of(rank, i);
            };
            pa_shm_call call{};
            call.told.type = PA_FLOAT32;
            call.told.numel = numel;
            if (is_direct) call.told.base = PAGE, call.told.length = length, call.told.delta = 64;
            pa_shm_call in_pieces = call;
            in_pieces.told.numel = 0;
            play_pieces(world, rank, part, is_direct ? whole : nullptr, in_pieces, run);
            const auto sum = [&](int64_t i) {
                float total = 0;
                for (int32_t other = 0; other < n; other++) total += value_of(other, i);
                return total;
            };

            fill();
            call.told.op = PA_SHM_ALL_REDUCE;
            call.in = call.out = whole;
            run(call);
            for (int64_t i = 0; i < numel; i++) expect(whole[i] == sum(i), "all-reduce");

            fill();
            call.told.op = PA_SHM_REDUCE_SCATTER;
            call.out = result.data();
            run(call);
            for (int64_t i = 0; i < part; i++) expect(result[i] == sum(rank * part + i), "reduce-scatter");

            fill();
            call.told.op = PA_SHM_ALL_GATHER;
            call.in = whole + rank * part;
            call.out = whole;
            run(call);
            for (int64_t i = 0; i < numel; i++)
                expect(whole[i] == value_of(static_cast<int32_t>(i / part), i), "all-gather");

            fill();
            call.told.op = PA_SHM_BROADCAST;
            call.told.root = n - 1;
            call.in = call.out = whole;
            run(call);
            for (int64_t i = 0; i < numel; i++) expect(whole[i] == value_of(n - 1, i), "broadcast");
            call.told.root = 0;

            fill();
            std::vector<float> turned(numel);
            call.told.op = PA_SHM_ALL_TO_ALL;
            call.out = turned.data();
            run(call);
            for (int64_t i = 0; i < numel; i++)
                expect(turned[i] == value_of(static_cast<int32_t>(i / part), rank * part + i % part), "all-to-all");

            // A message round the ring: even ranks send first.
            call.timeout_ns = 60000000000;
            const int32_t after = (rank + 1) % n, before = (rank + n - 1) % n;
            fill();
            call.in = whole;
            call.out = turned.data();
            const auto sends = [&] {
                expect(pa_shm_send(group, after, &call, missing.data()) == PA_SHM_OK, "send");
            };
            if (rank % 2 == 0) sends();
            expect(pa_shm_recv(group, before, &call, missing.data(), &theirs) == PA_SHM_OK, "receive");
            if (rank % 2) sends();
            for (int64_t i = 0; i < numel; i++) expect(turned[i] == value_of(before, i), "message");
        }
    }

    // Calls that do not agree are refused on every rank, and the group is of no use afterwards.
    pa_shm_call call{};
    call.timeout_ns = 60000000000;
    call.told.op = rank == 1 ? PA_SHM_BARRIER : PA_SHM_BROADCAST;
    expect(pa_shm_collective(group, &call, missing.data(), &theirs) == PA_SHM_MISMATCH, "a mismatch");
    expect(missing[rank == 1 ? 0 : 1] == 1, "the rank that strays");
    expect(theirs.op == (rank == 1 ? PA_SHM_BROADCAST : PA_SHM_BARRIER), "what it called");
    expect(pa_shm_collective(group, &call, missing.data(), &theirs) == PA_SHM_BROKEN, "a broken group");
    call.told.op = PA_SHM_OP_COUNT;
    expect(pa_shm_collective(group, &call, missing.data(), &theirs) == PA_SHM_BAD_CALL, "a bad call");
    pa_shm_leave(group);
    pa_shm_free(group);
    pa_shm_unmap(heap, world.heaps[rank], PAGE, length, 1);
}

}  // namespace

int main() {
    for (const int32_t size : {2, 3, 4}) {
        World world(size);
        std::vector<std::thread> ranks;
        for (int32_t rank = 0; rank < size; rank++) ranks.emplace_back(play, std::ref(world), rank);
        for (std::thread& one : ranks) one.join();
    }
    std::puts("shared memory: all is well");
    return 0;
}
