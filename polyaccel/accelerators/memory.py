"""What every host-side or device buffer of ours shares: the write counter of a piece of memory, and range checks."""

from __future__ import annotations

from polyaccel.buffer import Buffer
from polyaccel.errors import ShardingError

ALIGNMENT_NBYTES = 64
"""Every allocation starts on such a boundary: a cache line, a vector register, and what DLPack importers ask."""


class WriteCount:
    """How often a piece of memory was written; shared by a buffer and every view cut from it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class CountedBuffer(Buffer):
    """A buffer whose `generation` is a `WriteCount` that its views share. Subclasses say what the memory is."""

    def __init__(self, writes: WriteCount | None = None) -> None:
        self._writes = writes if writes is not None else WriteCount()

    @property
    def generation(self) -> int:
        return self._writes.value

    def mark_written(self) -> None:
        self._writes.value += 1

    def _check_range(self, offset: int, numel: int) -> None:
        if offset < 0 or numel < 0 or offset + numel > self.numel:
            raise ShardingError(
                f"elements [{offset}, {offset + numel}) are outside {self!r}",
                cure=f"a view lies inside [0, {self.numel})",
                value=(offset, numel),
            )

    def _check_source(self, source: Buffer) -> None:
        if source.numel != self.numel:
            raise ShardingError(
                f"cannot copy {source!r} to {self!r}", cure="cut views of equal numel", value=source.numel
            )

    def _check_nbytes(self, data: bytes | bytearray | memoryview) -> int:
        nbytes = memoryview(data).nbytes
        if nbytes != self.nbytes:
            raise ShardingError(f"{nbytes} bytes cannot fill {self!r} of {self.nbytes} bytes", value=nbytes)
        return nbytes
