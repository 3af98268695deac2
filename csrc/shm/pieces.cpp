// An all-to-all whose parts stand in pieces on one side: rows that are in one order where they are sent and in another
// where they arrive. Each is copied once, from the peer's buffer to its place, where that lies in the peer's heap.
//
// [Note: Exchange of piece lists]
// A receiver knows where a part belongs, and only the sender knows where it stands. So each rank first puts into its
// stage, for each peer: how many bytes there are for it, and in which pieces. Where some buffer is in no heap, or the
// pieces are more than the stage has room for, parts go through the stages, packed.

#include <string.h>

#include "call.h"

namespace {

struct Piece {
    int64_t from, nbytes;
};

// The part of one rank in a buffer.
struct Part {
    const int64_t* pairs;  // in elements; null where it is one piece
    int64_t count, itemsize;
    Piece whole;

    Piece piece(int64_t i) const {
        return pairs ? Piece{pairs[2 * i] * itemsize, pairs[2 * i + 1] * itemsize} : whole;
    }
};

Part part_of(const Call& c, int32_t peer, bool is_in) {
    const Parts parts = is_in ? c.in_parts() : c.parts();
    const Piece whole{parts.from(peer), parts.length(peer)};
    if ((c.call->cuts_in != 0) != is_in) return {nullptr, 1, c.itemsize, whole};
    return {c.call->pieces + 2 * c.call->piece_count * peer, c.call->piece_count, c.itemsize, whole};
}

// From a part whose pieces are a list to a part of this rank's, piece by piece.
void move_pieces(char* to, const Part& target, const char* from, const Piece* pieces, int64_t count, bool streams) {
    int64_t at = 0, done = 0;
    for (int64_t i = 0; i < target.count; i++) {
        Piece place = target.piece(i);
        while (place.nbytes > 0 && at < count) {
            const int64_t some = least(place.nbytes, pieces[at].nbytes - done);
            shm_copy(to + place.from, from + pieces[at].from + done, some, streams);
            place.from += some, place.nbytes -= some, done += some;
            if (done == pieces[at].nbytes) at++, done = 0;
        }
    }
}

// `some` bytes of a part, from `start` on, to or from packed bytes.
void pack(const Part& part, char* base, char* packed, int64_t start, int64_t some, bool unpacks) {
    for (int64_t i = 0; i < part.count && some > 0; i++) {
        Piece piece = part.piece(i);
        const int64_t skipped = least(start, piece.nbytes), length = least(piece.nbytes - skipped, some);
        start -= skipped;
        char* const place = base + piece.from + skipped;
        copy(unpacks ? place : packed, unpacks ? packed : place, length);
        packed += length, some -= length;
    }
}

struct Slip {
    int64_t nbytes, count;

    Piece* pieces() { return reinterpret_cast<Piece*>(this + 1); }
    const Piece* pieces() const { return reinterpret_cast<const Piece*>(this + 1); }
};

int32_t exchange_directly(const Call& c, int64_t slot) {
    const int32_t own = c.rank();
    const bool streams = c.parts().from(c.world()) >= STREAMED;
    for (int32_t i = 0; i < c.world(); i++) {
        const int32_t peer = c.peer(i);
        const char* const memory = peer == own ? c.in() : c.group->memory(peer, told_by(c, peer, c.group->epoch));
        if (!memory) return PA_SHM_NO_MEMORY;
        const Slip* const slip = reinterpret_cast<const Slip*>(c.read_stage(peer) + own * slot);
        move_pieces(c.out(), part_of(c, peer, false), memory, slip->pieces(), slip->count, streams);
    }
    if (streams) shm_fence();
    return c.step();
}

int32_t exchange_staged(const Call& c, int64_t slot) {
    const int32_t own = c.rank();
    int64_t longest = 0;
    for (int32_t i = 0; i < c.world(); i++) {
        const int64_t most = told_by(c, i, c.group->epoch).most * c.itemsize;
        longest = most > longest ? most : longest;
    }
    for (int64_t start = 0; start < longest; start += slot) {
        for (int32_t i = 0; i < c.world(); i++) {
            const Part part = part_of(c, i, true);
            pack(part, const_cast<char*>(c.in()), c.own_stage() + i * slot, start, some_of(part.whole.nbytes, start, slot),
                 false);
        }
        const int32_t status = c.step();
        if (status != PA_SHM_OK) return status;
        for (int32_t i = 0; i < c.world(); i++) {
            const Part part = part_of(c, c.peer(i), false);
            pack(part, c.out(), c.read_stage(c.peer(i)) + own * slot, start, some_of(part.whole.nbytes, start, slot), true);
        }
    }
    return PA_SHM_OK;
}

}  // namespace

int32_t shm_exchange_pieces(const Call& c, pa_shm_told* theirs) {
    const int64_t slot = cut_down(SHM_STAGE / c.world());
    const int64_t sent = c.call->cuts_in ? c.call->piece_count : 1;
    const bool has_room = static_cast<int64_t>(sizeof(Slip) + sent * sizeof(Piece)) <= slot;
    for (int32_t i = 0; i < c.world(); i++) {
        const Part part = part_of(c, i, true);
        Slip* const slip = reinterpret_cast<Slip*>(c.own_stage() + i * slot);
        slip->nbytes = part.whole.nbytes;
        slip->count = has_room ? part.count : 0;
        for (int64_t each = 0; each < slip->count; each++) slip->pieces()[each] = part.piece(each);
    }
    tell(c);
    if (!has_room) c.group->block.seats[c.rank()].told[(c.group->epoch + 1) & 1].length = 0;
    int32_t status = c.step();
    if (status == PA_SHM_OK) status = check_told(c, theirs);
    if (status != PA_SHM_OK) return status;
    for (int32_t i = 0; i < c.world(); i++) {
        const Slip* const slip = reinterpret_cast<const Slip*>(c.read_stage(i) + c.rank() * slot);
        if (slip->nbytes == part_of(c, i, false).whole.nbytes) continue;
        *theirs = told_by(c, i, c.group->epoch);
        theirs->numel = slip->nbytes / c.itemsize;
        c.patience.missing[i] = 1;
        return PA_SHM_MISMATCH;
    }
    return can_be_direct(c) ? exchange_directly(c, slot) : exchange_staged(c, slot);
}

bool shm_are_pieces(const pa_shm_group* group, const pa_shm_call* call) {
    const int64_t* const bounds = call->cuts_in ? call->in_bounds : call->bounds;
    if (call->told.op != PA_SHM_ALL_TO_ALL || !call->bounds || !call->in_bounds || call->piece_count < 0) return false;
    const int64_t* pair = call->pieces;
    for (int32_t rank = 0; rank < group->world; rank++) {
        int64_t left = bounds[rank + 1] - bounds[rank];
        for (int64_t i = 0; i < call->piece_count; i++, pair += 2) {
            if (pair[0] < 0 || pair[1] < 0 || pair[1] > left || pair[0] + pair[1] > bounds[group->world]) return false;
            left -= pair[1];
        }
        if (left) return false;
    }
    return true;
}
