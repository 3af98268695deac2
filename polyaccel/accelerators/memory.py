"""What buffers over torch and numpy memory share: the write counter of a piece of memory, range checks, alignment.

[Note: Staggered starts]
An optimizer reads four equally long buffers side by side. The system places large allocations next to each other, so
lengths that are powers of two put the four streams 4 KiB apart modulo 64 KiB, where the processor's prefetchers disturb
one another: Adam over 16 M elements ran at 31 GB/s there and at 50 GB/s elsewhere (one EPYC core). So each large host
allocation starts at the next of several offsets into a 64 KiB window, whatever the allocator did.
"""

from __future__ import annotations

from itertools import count

from polyaccel.buffer import Buffer
from polyaccel.errors import ShardingError

ALIGNMENT_NBYTES = 64
"""Every allocation starts on such a boundary: a cache line, a vector register, and what DLPack importers ask."""

_LARGE_NBYTES = 1 << 20
_WINDOW_NBYTES = 1 << 16
_STAGGER_NBYTES = 5 << 12  # odd in pages: sixteen allocations in a row have sixteen different offsets
_turns = count()


def spare_nbytes(nbytes: int) -> int:
    """How much longer than `nbytes` a host allocation has to be, for `aligned_shift` to find its start."""
    return _WINDOW_NBYTES if nbytes >= _LARGE_NBYTES else ALIGNMENT_NBYTES


def aligned_shift(address: int, nbytes: int) -> int:
    """How many bytes behind `address` an allocation of `nbytes` starts: aligned, and staggered when it is large.

    See [Note: Staggered starts].
    """
    if nbytes < _LARGE_NBYTES:
        return -address % ALIGNMENT_NBYTES
    return (next(_turns) * _STAGGER_NBYTES - address) % _WINDOW_NBYTES


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
