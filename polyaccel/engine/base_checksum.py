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
_POLYNOMIAL = 0xEDB88320  # of CRC-32, its bits reversed
_Matrix = tuple[int, ...]
"""A linear map of 32 bits: what it makes of each."""


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
    """Combine the CRC-32 of two consecutive byte ranges.

    As many zero bytes as the second text has are a linear map of the first one's bits: squared for every bit of their
    number (as `crc32_combine` of zlib, M. Adler).
    """
    power = _squared(_squared(_squared((_POLYNOMIAL, *(1 << bit for bit in range(31))))))  # one zero byte
    while second_nbytes:
        if second_nbytes & 1:
            first = _applied(power, first)
        power, second_nbytes = _squared(power), second_nbytes >> 1
    return first ^ second


def _crc(buffer: Buffer) -> int:
    crc = 0
    for part in _chunks(buffer):
        crc = crc32(part.to_bytes(), crc)
    return crc


def _chunks(buffer: Buffer) -> Iterator[Buffer]:
    step = _CHUNK_NBYTES // buffer.dtype.itemsize
    for start in range(0, buffer.numel, step):
        yield buffer.view(start, min(step, buffer.numel - start))


def _applied(matrix: _Matrix, bits: int) -> int:
    result, at = 0, 0
    while bits:
        if bits & 1:
            result ^= matrix[at]
        bits, at = bits >> 1, at + 1
    return result


def _squared(matrix: _Matrix) -> _Matrix:
    return tuple(_applied(matrix, column) for column in matrix)
