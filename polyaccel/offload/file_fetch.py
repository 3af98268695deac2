"""A file's contents on their way to the device: straight there where it works in host memory, else in pieces.

[Note: Rooms]
Pieces pass through a few host buffers, the rooms, that all fetches of a type share. A fetch reads into as many as are
free when it starts, but leaves the last one: whoever finishes first can then go on whatever the others hold. Once it is
finished, it reads as many pieces ahead as there are free rooms, while one is copied to the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from polyaccel.buffer import Buffer
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
            self._target.mark_written()

    def drop(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.wait()


class Rooms:
    """At most `count` buffers that `allocate` gives, made when they are first needed. See [Note: Rooms]."""

    def __init__(self, count: int, allocate: Callable[[], Buffer]) -> None:
        self._unmade = count
        self._allocate = allocate
        self._free: list[Buffer] = []

    @property
    def free_count(self) -> int:
        return self._unmade + len(self._free)

    def take(self) -> Buffer:
        """One of the free ones."""
        if self._free:
            return self._free.pop()
        room = self._allocate()
        self._unmade -= 1
        return room

    def give_back(self, room: Buffer) -> None:
        self._free.append(room)


class StagedFetch(Fetch):
    """Reads `file` through `rooms`, pieces of `step` elements, and copies them to `target` on the device."""

    def __init__(self, file: StateFile, target: Buffer, transfers: Transfers, step: int, rooms: Rooms) -> None:
        self._file = file
        self._target = target
        self._transfers = transfers
        self._step = step
        self._rooms = rooms
        self._starts = deque(range(0, target.numel, step))
        self._under_way: deque[tuple[int, Buffer, Buffer, Access]] = deque()
        """First element, room, the part of it that is read, and the reading."""
        self._read_ahead(leave=1)

    def _read_ahead(self, *, leave: int) -> None:
        while self._starts and self._rooms.free_count > leave:
            start, room = self._starts.popleft(), self._rooms.take()
            piece = room.view(0, min(self._step, self._target.numel - start))
            reading = self._file.start_reading(self._transfers, piece, start * piece.dtype.itemsize)
            self._under_way.append((start, room, piece, reading))

    def finish(self) -> None:
        try:
            while self._starts or self._under_way:
                self._read_ahead(leave=0)
                start, room, piece, reading = self._under_way.popleft()
                self._rooms.give_back(room)
                reading.finish()
                self._target.view(start, piece.numel).copy_from(piece)
        finally:
            self.drop()
        self._target.mark_written()

    def drop(self) -> None:
        self._starts.clear()
        while self._under_way:
            _, room, _, reading = self._under_way.popleft()
            reading.wait()
            self._rooms.give_back(room)
