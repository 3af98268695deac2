"""Checksums of frozen parameters that a checkpoint leaves out: an adapter's checkpoint is small, and continues from no
other base than its own.

A parameter's checksum is zlib's crc32 of all its bytes, whatever the ranks that hold them: those of slices are joined
as those of one text after another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from polyaccel.checkpoint.format.tensors import PARAM
from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.ops.native import crc32
from polyaccel.zero.trained_state import TrainedState

_CHUNK_NBYTES = 16 << 20
_ALL_BITS = 0xFFFFFFFF
_ZEROS = memoryview(bytes(1 << 20))


def base_checksums(zero: TrainedState, communicator: Communicator, names: Collection[str]) -> dict[str, str]:
    """The type and checksum of each of these parameters, by name; of none of which ranks hold blocks. Collective."""
    mine = []
    for slot, kind, start, buffer in zero.local_shards():
        if kind == PARAM and slot.param.fqn in names and slot.param.block is None:
            mine.append(
                (slot.param.fqn, buffer.dtype.value, start * buffer.dtype.itemsize, buffer.nbytes, _crc(buffer))
            )
    pieces = sorted(tuple(piece) for gathered in communicator.all_gather_object(mine) for piece in gathered)
    found: dict[str, tuple[str, int]] = {}
    for fqn, dtype, _, nbytes, crc in pieces:
        found[fqn] = (dtype, crc32_combine(found[fqn][1], crc, nbytes) if fqn in found else crc)
    return {fqn: f"{dtype}:{crc:08x}" for fqn, (dtype, crc) in found.items()}


def crc32_combine(first: int, second: int, second_nbytes: int) -> int:
    """Combine the CRC-32 of two consecutive byte ranges: it is linear, zero bytes move the first into place."""
    moved = first ^ _ALL_BITS
    for start in range(0, second_nbytes, len(_ZEROS)):
        moved = crc32(_ZEROS[: second_nbytes - start], moved)
    return moved ^ _ALL_BITS ^ second


def _crc(buffer: Buffer) -> int:
    crc = 0
    for part in _chunks(buffer):
        crc = crc32(part.to_bytes(), crc)
    return crc


def _chunks(buffer: Buffer) -> Iterator[Buffer]:
    step = _CHUNK_NBYTES // buffer.dtype.itemsize
    for start in range(0, buffer.numel, step):
        yield buffer.view(start, min(step, buffer.numel - start))
