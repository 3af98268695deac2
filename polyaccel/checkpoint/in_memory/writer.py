"""The replica of each step: a rank's part, copied into memory that the keeper holds too.

[Note: Replica generations] of `images` lists what memory parts have. Where ranks are on several hosts, each part also
goes to the keeper of the neighbour host (`neighbours`). The thread that has copied it sends it out of the image, so
neither the next pass nor the next update waits for that, only the next replica.

[Note: Copy times of a replica]
Parameters may be written by users as soon as the step has ended, so they are copied before it does. Master weights and
optimizer states change in the next update alone, so where they lie in host memory a thread copies them while the next
forward and backward pass run, and then computes all checksums; the update waits for it. A write to one of these in
between is noticed by the buffer's count of writes: then this step has no replica. What no update writes is not copied
again as long as its count stands still.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from polyaccel.checkpoint.format.manifest import encode_plain
from polyaccel.checkpoint.format.pieces import MAX_PIECE_NBYTES, FileLayout, PieceSpec, RankFile, TensorPiece
from polyaccel.checkpoint.format.save_folders import rank_file
from polyaccel.checkpoint.format.tensors import PARAM, Piece, TensorEntry
from polyaccel.checkpoint.in_memory.images import BufferSlot, DoubleBuffer, MemoryBudget, NoRoom
from polyaccel.checkpoint.in_memory.neighbours import NeighbourCopies
from polyaccel.checkpoint.in_memory.parts import PartKey, PartNote, begun_of, files_of, parts_of
from polyaccel.checkpoint.save.async_image import Image
from polyaccel.checkpoint.save.node_topology import StorageNodes
from polyaccel.checkpoint.save.protocol import SaveContents
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError, PolyaccelError
from polyaccel.job.memory_server.client import KeeperClient, KeeperGone

T = TypeVar("T")
_log = logging.getLogger(__name__)
_CHUNK_NBYTES = 1 << 20
"""So much is copied and then summed while it is in the processor's cache."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """What is left to do for a part in the background: segments to copy by number, with their buffers."""

    half: BufferSlot
    key: PartKey
    layout: FileLayout
    pieces: Mapping[int, TensorPiece]
    kept: frozenset[int]
    """Segments that are in the image already, with their checksums in `half.sums`."""
    note: PartNote


class ReplicaWriter:
    """This rank's parts of the replicas of engine `engine`, one after the other, in this start (`attempt`) of the job.

    `places` are the keepers of the ranks. `limit_nbytes` bounds its images; None is half of what the host has left,
    shared by its ranks. Collective.
    """

    def __init__(
        self,
        communicator: Communicator,
        engine: str,
        attempt: str,
        about: Mapping[str, Any],
        limit_nbytes: int | None,
        places: StorageNodes,
    ) -> None:
        self._communicator = communicator
        self._is_leader = places.is_leader(communicator.rank)
        room = MemoryBudget(communicator.rank, communicator.host_topology.local_size, limit_nbytes)
        self._own = DoubleBuffer(communicator.rank, room)
        self._neighbours = NeighbourCopies(communicator, places, room) if places.count > 1 else None
        self._client: KeeperClient | None = None
        self._engine = engine
        self._attempt = attempt
        self._about = about
        self._layout: FileLayout | None = None
        self._specs: tuple[PieceSpec, ...] = ()
        self._done: PartKey | None = None
        self._threads = ThreadPoolExecutor(1, "polyaccel replica")
        self._copied: Future[PartKey | None] | None = None
        self._kept: Future[bool] | None = None
        self._has_older = True
        self._logged = set[str]()

    def begin(self, step: int, contents: SaveContents, *, in_background: bool, not_finite: str) -> None:
        """Make the replica of `step`, which has just ended; what `contents` gives may change when this has returned,
        with the exceptions in [Note: Copy times of a replica]. Collective.

        `in_background`: buffers count their writes, and those in host memory may be read until `settle`. `not_finite`
        names a parameter with a gradient that was not finite and was applied. What goes wrong is logged.
        """
        self._conclude()
        rank = self._communicator.rank
        gathered = self._communicator.all_gather_object(
            (None if self._done is None else self._done.step, self._ready())
        )
        done = [each for each, _ in gathered]
        whole = min((each for each in done if each is not None), default=None) if None not in done else None
        if not all(ready for _, ready in gathered):
            return
        key = PartKey(step, self._attempt, self._engine, self._communicator.world_size, rank)
        copy: _Copy | None = None
        try:
            if whole is not None and self._has_older:
                self._drop_older()
            client = self._require_client()
            client.put(f"{begun_of(self._engine)}{self._attempt}/{rank:06d}", str(step).encode())
            copy = self._begin(key, whole, contents, in_background=in_background, not_finite=not_finite)
        except (CheckpointError, OSError) as error:
            self._note_failure(error)
        if in_background and (self._neighbours is None or self._neighbours.overlaps):
            self._copied = self._threads.submit(self._finish, copy)
            self._kept = self._threads.submit(self._exchange, key, whole, copy, self._copied)
        else:
            self._copied, self._kept = Future(), Future()
            _run(self._copied, self._finish, copy)
            _run(self._kept, self._exchange, key, whole, copy, self._copied)
            self._conclude()

    def settle(self) -> None:
        """Wait until the copy that is under way has ended: then anything may be written."""
        if self._copied is not None:
            wait([self._copied])

    def _conclude(self) -> None:
        """Wait until nothing is under way, and see how it went."""
        copied, kept = self._copied, self._kept
        self._copied = self._kept = None
        if copied is None or kept is None:
            return
        try:
            key = copied.result()
            self._done = key if kept.result() and key is not None else self._done
        except (CheckpointError, OSError) as error:
            wait([kept])
            self._note_failure(error)

    def forget(self) -> None:
        """The state of this engine is another one now: what was copied of it in this start counts no more."""
        self._conclude()
        self._done = None
        self._own.forget_parts()
        if self._neighbours is not None:
            self._neighbours.forget_parts()
        try:
            if self._client is not None and self._is_leader:
                self._client.drop(f"{parts_of(self._engine)}{self._attempt}/")
                self._client.drop(f"{begun_of(self._engine)}{self._attempt}/")
        except (CheckpointError, OSError) as error:
            self._note_failure(error)

    def close(self) -> None:
        """Release images and threads. What the keeper has stays."""
        self._conclude()
        self._threads.shutdown()
        self._let_go()
        if self._neighbours is not None:
            self._neighbours.close()
        if self._client is not None:
            self._client.close()

    # The parts of `begin`.

    def _begin(
        self, key: PartKey, whole: int | None, contents: SaveContents, *, in_background: bool, not_finite: str
    ) -> _Copy:
        """Copy what may change when this has returned. Raises CheckpointError."""
        pieces = tuple(contents.pieces())
        layout = self._laid_out(tuple(piece.spec for piece in pieces))
        half = self._own.half_for(whole, layout.nbytes, self._require_client())
        with half.image.view(0, len(layout.header)) as target:
            target[:] = layout.header
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
                seen = (_address(piece) or 0, piece.buffer.version)
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
        return _Copy(half, key, layout, later, frozenset(kept), note)

    def _exchange(self, key: PartKey, whole: int | None, copy: _Copy | None, copied: Future[PartKey | None]) -> bool:
        """Exchange parts with the neighbours, whatever came of this rank's own. Whether what had to come has come."""
        if self._neighbours is None:
            return True
        has_part = copied.exception() is None and copied.result() is not None
        part = (copy.note.to_bytes(), copy.half.image) if copy is not None and has_part else None
        return self._neighbours.exchange(key, whole, part, self._client)

    def _finish(self, copy: _Copy | None) -> PartKey | None:
        """Copy the rest, compute checksums, and hand the part to the keeper; None if it was written to meanwhile."""
        if copy is None:
            return None
        half, image = copy.half, copy.half.image
        written = [piece.buffer.version for piece in copy.pieces.values()]
        for number, segment in enumerate(copy.layout.segments):
            spec = segment.content
            assert isinstance(spec, PieceSpec)  # blobs stand in the note
            if number not in copy.kept:
                piece = copy.pieces.get(number)
                half.sums[number] = _summed(image, segment.offset, segment.nbytes, spec, piece)
            copy.note.file.tensors.append(_entry(spec, copy.layout.name, segment.offset, half.sums[number]))
        if written != [piece.buffer.version for piece in copy.pieces.values()]:
            _log.debug("step %d has no replica: states were written by hand meanwhile", copy.key.step)
            return None
        self._require_client().put(str(copy.key), copy.note.to_bytes(), image.descriptor)
        half.key = copy.key
        return copy.key

    def _laid_out(self, specs: tuple[PieceSpec, ...]) -> FileLayout:
        if self._layout is None or specs != self._specs:
            self._layout, self._specs = FileLayout.plan(rank_file(self._communicator.rank), specs, {}), specs
            self._own.forget_contents()
        return self._layout

    def _drop_older(self) -> None:
        """Replicas of this start are whole: release those of earlier ones."""
        self._has_older = False
        if self._is_leader:
            client = self._require_client()
            client.drop(f"{files_of(self._engine)}/")
            for folder in (parts_of(self._engine), begun_of(self._engine)):
                for attempt in {name[len(folder) :].partition("/")[0] for name in client.names(folder)}:
                    if attempt != self._attempt:
                        client.drop(f"{folder}{attempt}/")

    # A keeper that is lost.

    def _ready(self) -> bool:
        """Whether this rank can make a part; a keeper that was killed may have been started again."""
        if "room" in self._logged:
            return False
        if self._client is None:
            try:
                self._client = KeeperClient.from_environment(os.environ)
            except CheckpointError:
                return False
        return self._client is not None

    def _require_client(self) -> KeeperClient:
        if self._client is None:
            raise KeeperGone("the keeper of this host has ended")
        return self._client

    def _note_failure(self, error: CheckpointError | OSError) -> None:
        """Continue without replicas, and log that once a kind."""
        kind = "keeper" if isinstance(error, KeeperGone) else "room" if isinstance(error, NoRoom) else "other"
        if kind == "keeper":
            self._let_go()
            self._client = None
        if kind not in self._logged:
            message = f"{error.message}; {error.hint}" if isinstance(error, PolyaccelError) else str(error)
            _log.warning("rank %d makes no replicas for now: %s", self._communicator.rank, message.rstrip("; "))
        if kind != "keeper":
            self._logged.add(kind)

    def _let_go(self) -> None:
        self._done = None
        self._own.close()
        if self._neighbours is not None:
            self._neighbours.let_go()


def _run(future: Future[T], function: Callable[..., T], *args: Any) -> None:
    """Do it in this thread."""
    try:
        future.set_result(function(*args))
    except (CheckpointError, OSError) as error:
        future.set_exception(error)


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
