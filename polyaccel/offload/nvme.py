"""The nvme tier: states rest in files, one a buffer, and pass through a few host buffers when they are updated.

[Note: Piece buffers]
Pieces pass through a few host buffers that all fetches of a type share. A fetch reads into as many as are free when it
starts, but leaves the last one: the fetch that is finished first can then continue, whatever the others hold. `finish`
reads as many pieces ahead as there are free buffers, while it copies one to the device.
"""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from logging import getLogger
from pathlib import Path
from typing import ClassVar

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import InvariantError, OffloadError
from polyaccel.offload.file_buffer import FileBuffer
from polyaccel.offload.folder import RankFolder
from polyaccel.offload.prefetch_pipeline import Walk
from polyaccel.offload.state_file import Access, StateFile, padded
from polyaccel.offload.tier import Fetch, HostBackedTier, HostMemory, TierOptions
from polyaccel.offload.transfers import Transfers, describe_transfers, open_transfers

_log = getLogger(__name__)
_THREADS = 4  # a group has about three files, and some are read while others are written
_KEY = re.compile(r"[\w.-]+")


class NvmeTier(HostBackedTier):
    """Files below `<path>/polyaccel-<run id>/rank<rank>/`, deleted on `close` and at the end of the process.

    Files that a killed process left behind are deleted by the next job that uses the path. They carry no checksums: a
    file is read by the process that wrote it, seconds later, and summing it up twice a step would take longer than a
    fast disk; what a disk returns damaged in spite of its own error correction is not noticed here. Checkpoints are
    verified.
    """

    name = "nvme"
    is_resident: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._options = TierOptions()
        self._buffers: dict[str, FileBuffer] = {}
        self._free: dict[DType, list[Buffer]] = {}
        """Host buffers that no walk uses at present, by type."""
        self._piece_buffers: dict[tuple[DType, int], PieceBuffers] = {}
        """Host buffers through which files pass to the device, by type and length."""
        self._largest_nbytes: dict[DType, int] = {}
        """Bytes of the largest file of each type, in whole blocks: the length of host buffers of that type."""
        self._transfers: Transfers
        self._folder: RankFolder
        self._shut: Callable[[], object] = lambda: None
        self._is_lending = False

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True, reason=f"files, read and written by {describe_transfers()}")

    def open(self, accelerator: Accelerator, host: Accelerator, options: TierOptions) -> None:
        if options.path is None:
            raise OffloadError("the nvme tier has no directory for its files", hint="set nvme_path")
        self._folder = RankFolder(Path(options.path).absolute(), options.run_id, options.rank)
        try:
            self._transfers = open_transfers(_THREADS)
        except OffloadError:
            self._folder.remove()
            raise
        self._memory, self._options = HostMemory(accelerator, host, pin=options.pin_memory), options
        self._shut = weakref.finalize(self, _shut, self._transfers, self._folder)

    def allocate(self, key: str, numel: int, dtype: DType) -> Buffer:
        if key in self._buffers or not _KEY.fullmatch(key):
            raise InvariantError(f"{key!r} is in use, or cannot be a file's name", value=key)
        host = self.compute
        file = StateFile(self._folder.path / key, numel * dtype.itemsize)
        file.create()
        buffer = self._buffers[key] = FileBuffer(file, numel, dtype, host)
        self._largest_nbytes[dtype] = max(self._largest_nbytes.get(dtype, 0), padded(buffer.nbytes))
        return buffer

    def fetch(self, source: Buffer, target: Buffer) -> Fetch:
        file = _file_buffer(source).file
        if self._opened.is_the_devices:
            return DirectFetch(file, target, self._transfers)
        dtype = target.dtype
        step = max(1, min(self._options.piece_numel, self._largest_nbytes[dtype] // dtype.itemsize))
        key = (dtype, step)
        if key not in self._piece_buffers:
            self._piece_buffers[key] = PieceBuffers(self._options.buffer_count, lambda: self.stage(step, dtype))
        return StagedFetch(file, target, self._transfers, step, self._piece_buffers[key])

    def stream_groups(self, groups: Sequence[Sequence[Buffer]]) -> Generator[list[Buffer], None, None]:
        if self._is_lending:
            raise InvariantError("the nvme tier was asked to lend while it lends")
        files = [[_file_buffer(buffer) for buffer in group] for group in groups]
        self._is_lending = True
        failures: list[OffloadError] = []
        walk = Walk(files, self._options, self._transfers, self._take, self._give_back, failures)
        try:
            yield from walk.run()
        finally:
            walk.end()
            self._is_lending = False
            for failure in failures:
                _log.error("%s", failure.message)
        if failures:
            raise OffloadError(
                f"{len(failures)} buffers could not be written and stay in memory; the first: {failures[0].message}",
                hint=f"save a checkpoint now; {failures[0].hint}",
                value=failures[0].value,
            ) from failures[0]

    def close(self) -> None:
        self._shut()
        self._buffers.clear()
        self._free.clear()
        self._piece_buffers.clear()
        self._memory = None

    def _take(self, dtype: DType) -> Buffer:
        """A host buffer in which any file of `dtype` has room, in whole blocks."""
        room = self._largest_nbytes[dtype]
        free = self._free.setdefault(dtype, [])
        while free:
            buffer = free.pop()
            if buffer.nbytes >= room:  # else a larger file was allocated since
                return buffer
        return self.compute.allocate(room // dtype.itemsize, dtype)

    def _give_back(self, buffer: Buffer) -> None:
        self._free[buffer.dtype].append(buffer)


def _file_buffer(buffer: Buffer) -> FileBuffer:
    if not isinstance(buffer, FileBuffer) or buffer.nbytes != buffer.file.nbytes:
        raise InvariantError(f"{buffer!r} is not a whole buffer of the nvme tier", value=buffer)
    return buffer


def _shut(transfers: Transfers, folder: RankFolder) -> None:
    transfers.close()
    folder.remove()


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
