"""What each message of a transfer over groups carries, decided before it is sent and the same on all its ranks.

[Note: Messages of a transfer over groups]
A message has pieces of tensors, each from a multiple of 64 bytes on, and after them the CRC-32 of each piece. Pieces
follow each other in the order of the manifest, from one sender or several. Each message comes from one rank: the one
that owns the values. No rank gathers what another one sends, so ranks need two buckets of memory and no more.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyaccel.errors import CommError
from polyaccel.torch.weight_transfer.manifest import Manifest
from polyaccel.torch.weight_transfer.source import Run

ALIGNMENT_NBYTES = 64
DIGEST_NBYTES = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of the tensor `place` from `start` on, at byte `offset` of a message."""

    place: int
    start: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class GroupMessage:
    """A message from the rank `owner`. Its digests begin at byte `digests_at`."""

    owner: int
    pieces: tuple[Piece, ...]
    digests_at: int

    @property
    def nbytes(self) -> int:
        """Bytes of pieces and digests."""
        return self.digests_at + DIGEST_NBYTES * len(self.pieces)

    def digest_at(self, number: int) -> int:
        """Return the byte where the digest of a piece begins."""
        return self.digests_at + DIGEST_NBYTES * number


def plan_messages(runs: Sequence[Run], manifest: Manifest, bucket_nbytes: int) -> list[GroupMessage]:
    """Return the messages of all `runs`, each with at most `bucket_nbytes` bytes of pieces."""
    messages: list[GroupMessage] = []
    pieces: list[Piece] = []
    at, owner = 0, 0
    size = max(bucket_nbytes, ALIGNMENT_NBYTES)

    def end() -> None:
        if pieces:
            messages.append(GroupMessage(owner, tuple(pieces), at))
            pieces.clear()

    for run in runs:
        itemsize = manifest.tensors[run.place].dtype.itemsize
        done = 0
        while done < run.count or run.count == 0:
            if pieces and (run.owner != owner or size - at < itemsize):
                end()
            at, owner = at if pieces else 0, run.owner
            count = min((size - at) // itemsize, run.count - done)
            pieces.append(Piece(run.place, run.start + done, count, at))
            at = aligned(at + count * itemsize)
            done += count
            if run.count == 0:
                break
    end()
    return messages


def aligned(nbytes: int) -> int:
    """Return the next multiple of the alignment of pieces."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def encoded(messages: Sequence[GroupMessage]) -> bytes:
    """Return messages as JSON."""
    rows = [[one.owner, [[p.place, p.start, p.count, p.offset] for p in one.pieces]] for one in messages]
    return json.dumps(rows, separators=(",", ":")).encode()


def decoded(note: bytes, manifest: Manifest, owners: Sequence[int]) -> list[GroupMessage]:
    """Return messages from JSON. Raises CommError if a piece lies outside of its tensor or its message."""
    try:
        found = [_message(int(owner), rows, manifest) for owner, rows in json.loads(note)]
        if {one.owner for one in found} - {*owners}:
            raise ValueError("a sender without a group")
    except (ValueError, TypeError, IndexError, RecursionError, OverflowError) as error:
        raise CommError(f"malformed schedule of a weight transfer: {error!r}"[:300]) from error
    return found


def _message(owner: int, rows: Any, manifest: Manifest) -> GroupMessage:
    at, pieces = 0, []
    for row in rows:
        place, start, count, offset = map(int, row)
        if not 0 <= place < len(manifest.tensors):
            raise ValueError(f"tensor {place}")
        info = manifest.tensors[place]
        if min(start, count) < 0 or start + count > info.numel or offset != at:
            raise ValueError(f"a piece of {info.name!r} lies outside")
        at = aligned(at + count * info.dtype.itemsize)
        pieces.append(Piece(place, start, count, offset))
    return GroupMessage(owner, tuple(pieces), at)
