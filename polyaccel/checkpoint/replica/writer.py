"""The replica of each step: a rank's part, copied into memory that the keeper holds too.

[Note: Two generations]
A rank has two images. While one holds its part of the last replica that *every* rank has finished, the next part goes
into the other. Which step that last one is, the ranks agree on when they begin the next: each says which part it has
finished, and the oldest of these is whole. So at every instant there is one that is whole, a rank that dies in the
middle leaves it, and no rank waits for another's copy. The keeper knows of none of this: whoever reads takes the newest
step of which there are all parts. A part is dropped there before its image is written again.

[Note: What is copied when]
Parameters may be written by users as soon as the step has ended, so they are copied before it does. Master weights and
optimizer states change in the next update alone, so where they lie in host memory a thread copies them while the next
forward and backward pass run, and then computes all checksums; the update waits for it. Whoever writes one of these in
between is noticed by the buffer's count of writes: then this step has no replica. What no update writes is not copied
again as long as its count stands still.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from polyaccel.accelerators.memory.host import memory_stats
from polyaccel.checkpoint.background.image import Image
from polyaccel.checkpoint.pieces import MAX_PIECE_NBYTES, FileLayout, PieceSpec, RankFile, TensorPiece
from polyaccel.checkpoint.replica.parts import PartKey, PartNote, begun_of, files_of, parts_of
from polyaccel.checkpoint.saves import rank_file
from polyaccel.checkpoint.scalars import encode_plain
from polyaccel.checkpoint.steps import SaveContents
from polyaccel.checkpoint.tensors import PARAM, Piece, TensorEntry
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError, PolyaccelError
from polyaccel.launch.keeper.client import KeeperClient, KeeperGone

_log = logging.getLogger(__name__)
_CHUNK_NBYTES = 1 << 20
"""So much is copied and then summed while it is in the processor's cache."""


@dataclass
class _Half:
    """One of a rank's two images. `key`: the part that the keeper has in it. `frozen` has for segments of parameters
    that no update writes the count of writes when they were copied, `sums` their checksums."""

    image: Image
    key: PartKey | None = None
    frozen: dict[int, tuple[int, int]] = field(default_factory=dict)
    sums: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Copy:
    """What is left to do for a part in the background: segments to copy by number, with their buffers."""

    half: _Half
    key: PartKey
    layout: FileLayout
    pieces: Mapping[int, TensorPiece]
    kept: frozenset[int]
    """Segments that are in the image already, with their checksums in `half.sums`."""
    note: PartNote


class ReplicaWriter:
    """This rank's parts of the replicas of engine `engine`, one after the other, in this start (`attempt`) of the job.

    `limit_nbytes` bounds its two images; None is half of what the host has left, shared by its ranks.
    """

    def __init__(
        self,
        communicator: Communicator,
        engine: str,
        attempt: str,
        about: Mapping[str, Any],
        limit_nbytes: int | None,
    ) -> None:
        self._communicator = communicator
        self._client: KeeperClient | None = None
        self._engine = engine
        self._attempt = attempt
        self._about = about
        self._limit_nbytes = limit_nbytes
        self._layout: FileLayout | None = None
        self._specs: tuple[PieceSpec, ...] = ()
        self._halves: list[_Half] = []
        self._done: PartKey | None = None
        self._threads = ThreadPoolExecutor(1, "polyaccel replica")
        self._under_way: Future[PartKey | None] | None = None
        self._has_older = True
        self._told = set[str]()

    def begin(self, step: int, contents: SaveContents, *, in_background: bool, not_finite: str) -> None:
        """Make the replica of `step`, which has just ended; what `contents` gives may change when this has returned,
        but for what [Note: What is copied when] says. Collective.

        `in_background`: buffers count their writes, and those in host memory may be read until `settle`. `not_finite`
        names a parameter with a gradient that was not finite and was applied. What goes wrong is said in the log.
        """
        self.settle()
        rank = self._communicator.rank
        told = self._communicator.all_gather_object((None if self._done is None else self._done.step, self._ready()))
        done = [each for each, _ in told]
        whole = min((each for each in done if each is not None), default=None) if None not in done else None
        if not all(ready for _, ready in told):
            return
        try:
            if whole is not None and self._has_older:
                self._drop_older()
            key = PartKey(step, self._attempt, self._engine, self._communicator.world_size, rank)
            client = self._require_client()
            client.put(f"{begun_of(self._engine)}{self._attempt}/{rank:06d}", str(step).encode())
            self._begin(key, whole, contents, in_background=in_background, not_finite=not_finite)
        except (CheckpointError, OSError) as error:
            self._note_failure(error)

    def settle(self) -> None:
        """Wait until the copy that is under way has ended: then anything may be written."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        try:
            self._done = under_way.result() or self._done
        except (CheckpointError, OSError) as error:
            self._note_failure(error)

    def forget(self) -> None:
        """The state of this engine is another one now: what was copied of it in this start counts no more."""
        self.settle()
        self._done = None
        for half in self._halves:
            half.key = None
        try:
            if self._client is not None and self._communicator.rank == 0:
                self._client.drop(f"{parts_of(self._engine)}{self._attempt}/")
                self._client.drop(f"{begun_of(self._engine)}{self._attempt}/")
        except (CheckpointError, OSError) as error:
            self._note_failure(error)

    def close(self) -> None:
        """Let go of images and threads. What the keeper has stays."""
        self.settle()
        self._threads.shutdown()
        self._let_go()
        if self._client is not None:
            self._client.close()

    # The parts of `begin`.

    def _begin(
        self, key: PartKey, whole: int | None, contents: SaveContents, *, in_background: bool, not_finite: str
    ) -> None:
        pieces = tuple(contents.pieces())
        layout = self._laid_out(tuple(piece.spec for piece in pieces))
        half = self._half_beside(whole, layout)
        file = RankFile(layout.name, layout.nbytes, not_finite=not_finite)
        is_first = self._communicator.rank == 0
        note = PartNote(
            key.step,
            round(time.time(), 3),
            file,
            contents.rank_blobs,
            encode_plain(dict(contents.scalars if is_first else {}), "scalars"),
            encode_plain(dict(self._about if is_first else {}), "about"),
        )
        later, kept = dict[int, TensorPiece](), set[int]()
        for number, (segment, piece) in enumerate(zip(layout.segments, pieces, strict=True)):
            if in_background and piece.kind == PARAM and piece.fqn in contents.frozen:
                seen = (_address(piece) or 0, piece.buffer.generation)
                if half.frozen.get(number) == seen and number in half.sums:
                    kept.add(number)
                    continue
                half.frozen[number] = seen
                half.sums.pop(number, None)
            if in_background and piece.kind not in (PARAM, "buffer") and _address(piece) is not None:
                later[number] = piece
                continue
            with half.image.view(segment.offset, segment.nbytes) as target:
                piece.buffer.copy_to_host(target)
        copy = _Copy(half, key, layout, later, frozenset(kept), note)
        if in_background:
            self._under_way = self._threads.submit(self._finish, copy)
        else:
            self._done = self._finish(copy) or self._done

    def _finish(self, copy: _Copy) -> PartKey | None:
        """Copy what is left, compute checksums, and let the keeper have the part. None where something was written
        meanwhile."""
        half, image = copy.half, copy.half.image
        written = [piece.buffer.generation for piece in copy.pieces.values()]
        for number, segment in enumerate(copy.layout.segments):
            spec = segment.content
            assert isinstance(spec, PieceSpec)  # blobs stand in the note
            if number not in copy.kept:
                piece = copy.pieces.get(number)
                half.sums[number] = _summed(image, segment.offset, segment.nbytes, spec, piece)
            copy.note.file.tensors.append(_entry(spec, copy.layout.name, segment.offset, half.sums[number]))
        if written != [piece.buffer.generation for piece in copy.pieces.values()]:
            _log.debug("step %d has no replica: states were written by hand meanwhile", copy.key.step)
            return None
        self._require_client().put(str(copy.key), copy.note.to_bytes(), image.descriptor)
        half.key = copy.key
        return copy.key

    def _laid_out(self, specs: tuple[PieceSpec, ...]) -> FileLayout:
        if self._layout is None or specs != self._specs:
            self._layout, self._specs = FileLayout.plan(rank_file(self._communicator.rank), specs, {}), specs
            for half in self._halves:  # their contents stay until others are whole
                half.frozen.clear()
                half.sums.clear()
        return self._layout

    def _half_beside(self, whole: int | None, layout: FileLayout) -> _Half:
        """The image that does not hold this rank's part of the step that is `whole`, its part dropped."""
        free = [half for half in self._halves if half.key is None or half.key.step != whole]
        if len(self._halves) < 2 and not free:
            free = [self._new(layout)]
            self._halves += free
        half = free[0]
        if half.key is not None:
            self._require_client().drop(str(half.key))
            half.key = None
        if half.image.nbytes != layout.nbytes:
            self._halves.remove(half)
            half.image.close()
            half = self._new(layout)
            self._halves.append(half)
        with half.image.view(0, len(layout.header)) as target:
            target[:] = layout.header
        return half

    def _new(self, layout: FileLayout) -> _Half:
        """Raises CheckpointError where there is no room."""
        most = self._limit_nbytes
        if most is None:
            world_size = self._communicator.world_size
            ranks_here = max(1, min(int(os.environ.get("LOCAL_WORLD_SIZE") or world_size), world_size))
            # Both images, or the second beside what the first has taken already.
            most = memory_stats().free_nbytes // 2 // ranks_here + sum(half.image.nbytes for half in self._halves)
        if 2 * layout.nbytes > most:
            raise _NoRoom(
                f"replicas of rank {self._communicator.rank} would take {2 * layout.nbytes:,} bytes, and may take "
                f"{most:,}",
                cure='raise "checkpoint.replica": {"memory": BYTES}, or free some memory',
                value=layout.nbytes,
            )
        return _Half(Image.new(layout.nbytes))

    def _drop_older(self) -> None:
        """Replicas of this start are whole: let go of those of earlier ones."""
        self._has_older = False
        if self._communicator.rank == 0:
            client = self._require_client()
            client.drop(f"{files_of(self._engine)}/")
            for folder in (parts_of(self._engine), begun_of(self._engine)):
                for attempt in {name[len(folder) :].partition("/")[0] for name in client.names(folder)}:
                    if attempt != self._attempt:
                        client.drop(f"{folder}{attempt}/")

    # A keeper that is lost.

    def _ready(self) -> bool:
        """Whether this rank can make a part; a keeper that was killed may have been started again."""
        if "room" in self._told:
            return False
        if self._client is None:
            try:
                self._client = KeeperClient.of(os.environ)
            except CheckpointError:
                return False
        return self._client is not None

    def _require_client(self) -> KeeperClient:
        if self._client is None:
            raise KeeperGone("the keeper of this host has ended")
        return self._client

    def _note_failure(self, error: CheckpointError | OSError) -> None:
        """Go on without replicas, and say so once a kind."""
        kind = "keeper" if isinstance(error, KeeperGone) else "room" if isinstance(error, _NoRoom) else "other"
        if kind == "keeper":
            self._let_go()
            self._client = None
        if kind not in self._told:
            message = f"{error.message}; {error.cure}" if isinstance(error, PolyaccelError) else str(error)
            _log.warning("rank %d makes no replicas for now: %s", self._communicator.rank, message.rstrip("; "))
        if kind != "keeper":
            self._told.add(kind)

    def _let_go(self) -> None:
        self._done = None
        while self._halves:
            self._halves.pop().image.close()


class _NoRoom(CheckpointError):
    """Two images would be more than a rank may take."""


def _address(piece: TensorPiece) -> int | None:
    """Where a buffer of host memory is; None for any other."""
    if piece.buffer.device.type != "cpu":
        return None
    try:
        return piece.buffer.data_ptr()
    except PolyaccelError:  # it rests elsewhere
        return None


def _summed(image: Image, offset: int, nbytes: int, spec: PieceSpec, piece: TensorPiece | None) -> tuple[int, ...]:
    """The checksums of a segment's runs, copied from `piece` first if that is given."""
    sums, source = list[int](), None if piece is None else _address(piece)
    run_nbytes = MAX_PIECE_NBYTES // spec.dtype.itemsize * spec.dtype.itemsize
    for first in range(0, nbytes, run_nbytes):
        end, crc32 = min(first + run_nbytes, nbytes), 0
        for at in range(first, end, _CHUNK_NBYTES):
            chunk = min(_CHUNK_NBYTES, end - at)
            if source is not None:
                image.take(offset + at, source + at, chunk)
            crc32 = image.crc32(offset + at, chunk, crc32)
        sums.append(crc32)
    return tuple(sums)


def _entry(spec: PieceSpec, file: str, offset: int, sums: Sequence[int]) -> TensorEntry:
    numel = MAX_PIECE_NBYTES // spec.dtype.itemsize
    pieces = tuple(
        Piece(
            spec.start + at * numel,
            min(numel, spec.length - at * numel),
            file,
            offset + at * numel * spec.dtype.itemsize,
            crc32,
            spec.block,
        )
        for at, crc32 in enumerate(sums)
    )
    return TensorEntry(spec.fqn, spec.kind, spec.shape, spec.dtype, pieces)
