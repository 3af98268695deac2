"""A file's contents on their way to the device: straight there where it works in host memory, else in pieces.

[Note: Piece buffers]
Pieces pass through a few host buffers that all fetches of a type share. A fetch reads into as many as are free when it
starts, but leaves the last one: the fetch that is finished first can then continue, whatever the others hold. `finish`
reads as many pieces ahead as there are free buffers, while it copies one to the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from polyaccel.core.buffer import Buffer
from polyaccel.offload.state_file import Access, StateFile
from polyaccel.offload.tier import Fetch
from polyaccel.offload.transfers import Transfers


class DirectFetch(Fetch):
    """Reads `file` into `target`, which is in host memory."""

    def __init__(self, file: StateFile, target: Buffer, transfers: Transfers) -> None:
        self._target = target
        self._reading: Access | None = file.start_reading(transfers, target)

    def finish(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.finish()
            self._target.bump_version()

    def cancel(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.wait()


class PieceBuffers:
    """At most `count` buffers that `allocate` gives, made when they are first needed. See [Note: Piece buffers]."""

    def __init__(self, count: int, allocate: Callable[[], Buffer]) -> None:
        self._unmade = count
        self._allocate = allocate
        self._free: list[Buffer] = []

    @property
    def free_count(self) -> int:
        return self._unmade + len(self._free)

    def take(self) -> Buffer:
        """A free buffer, made now if it was never used."""
        if self._free:
            return self._free.pop()
        buffer = self._allocate()
        self._unmade -= 1
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        self._free.append(buffer)


class StagedFetch(Fetch):
    """Reads `file` through `buffers`, pieces of `step` elements, and copies them to `target` on the device."""

    def __init__(self, file: StateFile, target: Buffer, transfers: Transfers, step: int, buffers: PieceBuffers) -> None:
        self._file = file
        self._target = target
        self._transfers = transfers
        self._step = step
        self._buffers = buffers
        self._starts = deque(range(0, target.numel, step))
        self._under_way: deque[tuple[int, Buffer, Buffer, Access]] = deque()
        """For each piece that is being read: its first element in the target, its buffer, the part of that, and the
        reading."""
        self._read_ahead(leave=1)

    def _read_ahead(self, *, leave: int) -> None:
        while self._starts and self._buffers.free_count > leave:
            start, buffer = self._starts.popleft(), self._buffers.take()
            piece = buffer.view(0, min(self._step, self._target.numel - start))
            reading = self._file.start_reading(self._transfers, piece, start * piece.dtype.itemsize)
            self._under_way.append((start, buffer, piece, reading))

    def finish(self) -> None:
        try:
            while self._starts or self._under_way:
                self._read_ahead(leave=0)
                start, buffer, piece, reading = self._under_way.popleft()
                self._buffers.give_back(buffer)
                reading.finish()
                self._target.view(start, piece.numel).copy_from(piece)
        finally:
            self.cancel()
        self._target.bump_version()

    def cancel(self) -> None:
        self._starts.clear()
        while self._under_way:
            _, buffer, _, reading = self._under_way.popleft()
            reading.wait()
            self._buffers.give_back(buffer)
