// Collectives: staged through the control block, or direct where the peers can map each other's buffers.
//
// Every function here runs the same steps on every rank, for they follow from what the ranks have agreed on.
//
// [Note: Reduction order] in polyaccel/comm/collectives/reduction.py holds here: ((p0 + p1) + p2) + ... for each element,
// whoever adds it and however the buffer is cut.

#include <stdint.h>
#include <string.h>

#include "call.h"

namespace {

enum : int64_t {
    SMALL = 32 << 10,            // up to here everybody reduces everything, which takes one step instead of two
    DIRECT = 64 << 10,           // from here a step more is worth not copying to the stages
    STREAMED_SUMS = 32 << 20,    // sums are `STREAMED` later, for they have just read where they write
    HEAD = 64                    // in front of a part whose length the receiver cannot know to be what it expects
};

// A step in a loop: the first one checks.
int32_t next_step(const Call& c, bool is_first, pa_shm_told* theirs) {
    return is_first ? first_step(c, theirs) : c.step();
}

// To everybody, or in a gather to the root alone.
int32_t all_gather(const Call& c, pa_shm_told* theirs) {
    const bool receives = c.call->told.op == PA_SHM_ALL_GATHER || c.call->told.root == c.rank();
    const Parts parts = c.parts();
    const int64_t length = parts.length(c.rank()), longest = parts.longest(c.world());
    int64_t start = 0;
    do {
        const int64_t some = some_of(length, start, SHM_STAGE);
        copy(c.own_stage(), c.in() + start, some);
        if (receives) shm_copy(c.out() + parts.from(c.rank()) + start, c.in() + start, some, c.streams);
        const int32_t status = next_step(c, start == 0, theirs);
        if (status != PA_SHM_OK) return status;
        for (int32_t i = 1; i < c.world() && receives; i++) {
            const int32_t peer = c.peer(i);
            shm_copy(c.out() + parts.from(peer) + start, c.read_stage(peer),
                     some_of(parts.length(peer), start, SHM_STAGE), c.streams);
        }
        start += SHM_STAGE;
    } while (start < longest);
    return PA_SHM_OK;
}

int32_t all_to_all(const Call& c, pa_shm_told* theirs) {
    const Parts outs = c.parts(), ins = c.in_parts();
    const bool is_uneven = c.call->bounds != nullptr;
    const int64_t head = is_uneven ? int64_t{HEAD} : 0, slot = cut_down(SHM_STAGE / c.world()), room = slot - head;
    const int32_t own = c.rank();
    int64_t start = 0, longest = outs.equal;
    do {
        for (int32_t i = 1; i < c.world(); i++) {
            const int32_t peer = c.peer(i);
            char* const place = c.own_stage() + peer * slot;
            const int64_t length = ins.length(peer);
            if (is_uneven) memcpy(place, &length, sizeof(length));
            copy(place + head, c.in() + ins.from(peer) + start, some_of(length, start, room));
        }
        shm_copy(c.out() + outs.from(own) + start, c.in() + ins.from(own) + start,
                 some_of(outs.length(own), start, room), c.streams);
        const int32_t status = next_step(c, start == 0, theirs);
        if (status != PA_SHM_OK) return status;
        if (start == 0)
            for (int32_t i = 0; i < c.world() && is_uneven; i++) {
                const int64_t most = told_by(c, i, c.group->epoch).most * c.itemsize;
                longest = most > longest ? most : longest;
            }
        for (int32_t i = 1; i < c.world(); i++) {
            const int32_t peer = c.peer(i);
            const char* const place = c.read_stage(peer) + own * slot;
            int64_t length = outs.length(peer);
            if (is_uneven) memcpy(&length, place, sizeof(length));
            if (length != outs.length(peer)) {
                *theirs = told_by(c, peer, c.group->epoch);
                theirs->numel = length / c.itemsize;
                c.patience.missing[peer] = 1;
                return PA_SHM_MISMATCH;
            }
            shm_copy(c.out() + outs.from(peer) + start, place + head, some_of(length, start, room), c.streams);
        }
        start += room;
    } while (start < longest);
    return PA_SHM_OK;
}

int32_t scatter(const Call& c, pa_shm_told* theirs) {
    const int32_t root = c.call->told.root, own = c.rank();
    const Parts parts = c.parts();
    const int64_t room = cut_down(SHM_STAGE / c.world()), longest = parts.longest(c.world());
    int64_t start = 0;
    do {
        for (int32_t i = 0; i < c.world() && own == root; i++) {
            const int64_t some = some_of(parts.length(i), start, room);
            const char* const from = c.in() + parts.from(i) + start;
            if (i == own) shm_copy(c.out() + start, from, some, c.streams);
            else copy(c.own_stage() + i * room, from, some);
        }
        const int32_t status = next_step(c, start == 0, theirs);
        if (status != PA_SHM_OK) return status;
        if (own != root)
            shm_copy(c.out() + start, c.read_stage(root) + own * room, some_of(parts.length(own), start, room),
                     c.streams);
        start += room;
    } while (start < longest);
    return PA_SHM_OK;
}

int32_t broadcast(const Call& c, pa_shm_told* theirs) {
    const bool is_root = c.call->told.root == c.rank();
    int64_t start = 0;
    do {
        const int64_t some = least(SHM_STAGE, c.nbytes - start);
        if (is_root) copy(c.own_stage(), c.in() + start, some);
        const int32_t status = next_step(c, start == 0, theirs);
        if (status != PA_SHM_OK) return status;
        if (!is_root) shm_copy(c.out() + start, c.read_stage(c.call->told.root), some, c.streams);
        start += some;
    } while (start < c.nbytes);
    return PA_SHM_OK;
}

int32_t reduce_scatter(const Call& c, pa_shm_told* theirs) {
    const Parts parts = c.parts();
    const int64_t room = cut_down(SHM_STAGE / c.world()), longest = parts.longest(c.world());
    const char* const own = c.in() + parts.from(c.rank());
    int64_t start = 0;
    do {
        for (int32_t i = 1; i < c.world(); i++) {
            const int32_t peer = c.peer(i);
            copy(c.own_stage() + peer * room, c.in() + parts.from(peer) + start,
                 some_of(parts.length(peer), start, room));
        }
        const int32_t status = next_step(c, start == 0, theirs);
        if (status != PA_SHM_OK) return status;
        const char* pieces[PA_SHM_MOST_RANKS];
        for (int32_t i = 0; i < c.world(); i++) pieces[i] = c.read_stage(i) + c.rank() * room;
        pieces[c.rank()] = own + start;
        char* const place = c.out() + start;
        c.reduce(some_of(parts.length(c.rank()), start, room), pieces, &place, 1);
        start += room;
    } while (start < longest);
    return PA_SHM_OK;
}

int32_t all_reduce_small(const Call& c, pa_shm_told* theirs) {
    copy(c.own_stage(), c.in(), c.nbytes);
    const int32_t status = first_step(c, theirs);
    if (status != PA_SHM_OK) return status;
    const char* parts[PA_SHM_MOST_RANKS];
    for (int32_t i = 0; i < c.world(); i++) parts[i] = c.read_stage(i);
    char* const place = c.out();
    c.reduce(c.nbytes, parts, &place, 1);
    return PA_SHM_OK;
}

// A chunk of an all-reduce: one piece for each rank, equal except for the last ones.
struct Chunk {
    int64_t start, piece, end;

    Chunk(int64_t nbytes, int64_t most, int32_t world, int64_t index) {
        start = least(index * most, nbytes);
        end = least(start + most, nbytes);
        piece = cut_up((end - start + world - 1) / world);
    }
    int64_t from(int32_t rank) const { return least(start + rank * piece, end); }
    int64_t length(int32_t rank) const { return from(rank + 1) - from(rank); }
};

// Scatter and gather in one: step k brings the pieces of chunk k to those who reduce them, and the reduced pieces of
// chunk k - 1 to everybody.
int32_t all_reduce_large(const Call& c, pa_shm_told* theirs) {
    const int32_t world = c.world(), rank = c.rank();
    const int64_t room = cut_down(SHM_STAGE / (world + 1)), most = room * world;
    const int64_t chunks = (c.nbytes + most - 1) / most;
    for (int64_t k = 0; k <= chunks; k++) {
        const Chunk now(c.nbytes, most, world, k), before(c.nbytes, most, world, k - 1);
        for (int32_t i = 1; i < world && k < chunks; i++)
            copy(c.own_stage() + c.peer(i) * room, c.in() + now.from(c.peer(i)), now.length(c.peer(i)));
        const int32_t status = next_step(c, k == 0, theirs);
        if (status != PA_SHM_OK) return status;
        if (k < chunks) {
            const char* parts[PA_SHM_MOST_RANKS];
            for (int32_t i = 0; i < world; i++) parts[i] = c.read_stage(i) + rank * room;
            parts[rank] = c.in() + now.from(rank);
            char* const places[2] = {c.out() + now.from(rank), c.own_stage() + world * room};
            // Not streamed: the peers read the staged copy at once.
            shm_reduce(c.call->told.type, c.call->told.reduce, now.length(rank) / c.itemsize, parts, world, places, 2,
                       false);
        }
        for (int32_t i = 1; i < world && k > 0; i++)
            shm_copy(c.out() + before.from(c.peer(i)), c.read_stage(c.peer(i)) + world * room,
                     before.length(c.peer(i)), c.streams);
    }
    return PA_SHM_OK;
}

// Direct forms, of buffers that lie in the ranks' heaps. The buffers are the peers' to read from the first step on, and
// this rank's own again after the last one.

int32_t direct_reduce(const Call& c, char* const* buffers, bool scatters) {
    const int32_t world = c.world(), rank = c.rank();
    const int64_t piece = cut_up((c.nbytes + world - 1) / world), cut = least(rank * piece, c.nbytes);
    const int64_t from = scatters ? c.parts().from(rank) : cut;
    const int64_t length = scatters ? c.parts().length(rank) : least(cut + piece, c.nbytes) - cut;
    const char* parts[PA_SHM_MOST_RANKS];
    char* places[PA_SHM_MOST_RANKS];
    for (int32_t i = 0; i < world; i++) parts[i] = places[i] = buffers[i] + from;
    if (scatters) places[0] = c.out();
    c.reduce(length, parts, places, scatters ? 1 : world);
    return PA_SHM_OK;
}

int32_t direct_gather(const Call& c, char* const* buffers) {
    const Parts parts = c.parts();
    shm_copy(c.out() + parts.from(c.rank()), c.in(), parts.length(c.rank()), false);
    const int32_t status = c.step();
    if (status != PA_SHM_OK) return status;
    for (int32_t i = 1; i < c.world(); i++) {
        const int64_t from = parts.from(c.peer(i));
        shm_copy(c.out() + from, buffers[c.peer(i)] + from, parts.length(c.peer(i)), c.streams);
    }
    return PA_SHM_OK;
}

int32_t direct(const Call& c) {
    char* buffers[PA_SHM_MOST_RANKS];
    const bool gathers = c.call->told.op == PA_SHM_ALL_GATHER;
    for (int32_t i = 0; i < c.world(); i++) {
        buffers[i] = i != c.rank() ? c.group->memory(i, told_by(c, i, c.group->epoch))
                     : gathers     ? c.out()
                                   : const_cast<char*>(c.in());
        if (!buffers[i]) return PA_SHM_NO_MEMORY;
    }
    const int32_t status =
        gathers ? direct_gather(c, buffers) : direct_reduce(c, buffers, c.call->told.op == PA_SHM_REDUCE_SCATTER);
    if (status != PA_SHM_OK) return status;
    if (c.streams) shm_fence();
    return c.step();
}

// Whether a direct form exists; then the first step only exchanges where the buffers are.
bool may_be_direct(const Call& c) {
    const int32_t op = c.call->told.op;
    return c.nbytes >= DIRECT && (op == PA_SHM_ALL_REDUCE || op == PA_SHM_REDUCE_SCATTER || op == PA_SHM_ALL_GATHER);
}

// Everybody's part of the one memory that all ranks have is in its place; they need only know of each other.
int32_t publish(const Call& c, pa_shm_told* theirs) {
    const Parts parts = c.parts();
    if (c.call->told.op == PA_SHM_ALL_GATHER)
        shm_copy(c.out() + parts.from(c.rank()), c.in(), parts.length(c.rank()), false);
    return first_step(c, theirs);
}

int32_t run(const Call& c, pa_shm_told* theirs) {
    if (c.call->told.is_shared) return publish(c, theirs);
    if (may_be_direct(c)) {
        const int32_t status = first_step(c, theirs);
        if (status != PA_SHM_OK) return status;
        if (can_be_direct(c)) return direct(c);
    }
    switch (c.call->told.op) {
        case PA_SHM_ALL_REDUCE:
            return c.nbytes <= SMALL ? all_reduce_small(c, theirs) : all_reduce_large(c, theirs);
        case PA_SHM_REDUCE_SCATTER: return reduce_scatter(c, theirs);
        case PA_SHM_ALL_GATHER:
        case PA_SHM_GATHER: return all_gather(c, theirs);
        case PA_SHM_SCATTER: return scatter(c, theirs);
        case PA_SHM_BROADCAST: return broadcast(c, theirs);
        case PA_SHM_ALL_TO_ALL: return c.call->pieces ? shm_exchange_pieces(c, theirs) : all_to_all(c, theirs);
        default: return first_step(c, theirs);
    }
}

// Ends a call: what failed once fails from now on, for half of it may have moved, and the peers need not wait for this
// rank.
int32_t ended(pa_shm_group* group, int32_t status) {
    if (status != PA_SHM_OK) {
        group->is_broken = true;
        pa_shm_leave(group);
    }
    return status;
}

int32_t send(pa_shm_group* group, int32_t peer, const pa_shm_call* call, const ShmPatience& patience) {
    ShmChannel& channel = group->channel(group->rank, peer);
    const int64_t nbytes = call->told.numel * itemsize_of(call->told.type);
    int64_t start = 0;
    do {
        const uint32_t turn = channel.sent.count.load(std::memory_order_relaxed);
        const int32_t status = shm_wait(group, channel.taken, turn + 1 - SHM_PACKETS, patience, peer, false);
        if (status != PA_SHM_OK) return status;
        ShmPacket& packet = channel.packets[turn % SHM_PACKETS];
        packet.numel = call->told.numel;
        packet.type = call->told.type;
        const int64_t some = least(SHM_PACKET, nbytes - start);
        copy(packet.data, static_cast<const char*>(call->in) + start, some);
        shm_count(channel.sent, turn + 1);
        start += some;
    } while (start < nbytes);
    return PA_SHM_OK;
}

int32_t receive(pa_shm_group* group, int32_t peer, const pa_shm_call* call, const ShmPatience& patience,
                pa_shm_told* theirs) {
    ShmChannel& channel = group->channel(peer, group->rank);
    const int64_t nbytes = call->told.numel * itemsize_of(call->told.type);
    int64_t start = 0;
    do {
        const uint32_t turn = channel.taken.count.load(std::memory_order_relaxed);
        const int32_t status = shm_wait(group, channel.sent, turn + 1, patience, peer, false);
        if (status != PA_SHM_OK) return status;
        const ShmPacket& packet = channel.packets[turn % SHM_PACKETS];
        if (packet.numel != call->told.numel || packet.type != call->told.type) {
            *theirs = call->told;
            theirs->numel = packet.numel;
            theirs->type = packet.type;
            patience.missing[peer] = 1;
            return PA_SHM_MISMATCH;
        }
        const int64_t some = least(SHM_PACKET, nbytes - start);
        copy(static_cast<char*>(call->out) + start, packet.data, some);
        shm_count(channel.taken, turn + 1);
        start += some;
    } while (start < nbytes);
    return PA_SHM_OK;
}

}  // namespace

int32_t pa_shm_collective(pa_shm_group* group, const pa_shm_call* call, uint8_t* missing, pa_shm_told* theirs) {
    const pa_shm_told& told = call->told;
    if (told.op < 0 || told.op >= PA_SHM_OP_COUNT || told.type < 0 || told.type >= PA_TYPE_COUNT || told.reduce < 0 ||
        told.reduce >= PA_SHM_REDUCE_COUNT || told.numel < 0 || told.root < 0 || told.root >= group->world ||
        (told.is_shared && told.op != PA_SHM_ALL_GATHER && told.op != PA_SHM_BROADCAST))
        return PA_SHM_BAD_CALL;
    if (call->pieces && !shm_are_pieces(group, call)) return PA_SHM_BAD_CALL;
    if (group->is_broken) return PA_SHM_BROKEN;
    const int64_t itemsize = itemsize_of(told.type), nbytes = told.numel * itemsize;
    const bool sums = told.op == PA_SHM_ALL_REDUCE || told.op == PA_SHM_REDUCE_SCATTER;
    const bool streams = nbytes >= (sums ? int64_t{STREAMED_SUMS} : int64_t{STREAMED});
    const Call c{group, call, shm_patience(call, missing), itemsize, nbytes, streams};
    shm_release_python();
    const int32_t status = ended(group, run(c, theirs));
    if (c.streams) shm_fence();
    shm_take_python();
    return status;
}

int32_t pa_shm_send(pa_shm_group* group, int32_t peer, const pa_shm_call* call, uint8_t* missing) {
    if (group->is_broken) return PA_SHM_BROKEN;
    shm_release_python();
    const int32_t status = ended(group, send(group, peer, call, shm_patience(call, missing)));
    shm_take_python();
    return status;
}

int32_t pa_shm_recv(pa_shm_group* group, int32_t peer, const pa_shm_call* call, uint8_t* missing,
                    pa_shm_told* theirs) {
    if (group->is_broken) return PA_SHM_BROKEN;
    shm_release_python();
    const int32_t status = ended(group, receive(group, peer, call, shm_patience(call, missing), theirs));
    shm_take_python();
    return status;
}
