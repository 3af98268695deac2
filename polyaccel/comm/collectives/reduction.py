"""Reduction of the ranks' pieces on this rank, in rank order, with the accelerator's own kernels.

[Note: Reduction order]
Element by element the result is ((p0 + p1) + p2) + ..., for every size and on every rank, so that an all-reduce, a
reduce-scatter and any cutting into buckets have the same bits. 16-bit floats are added in float32 and rounded once. The
first addition may be computed as p1 + p0, which is the same in IEEE arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.ops.base import REDUCE, SCALE

_NARROW = frozenset({DType.BFLOAT16, DType.FLOAT16})
_CHUNK_NUMEL = 1 << 16  # 256 KiB of float32: a wide sum stays in the cache of a core


def reduce_parts(accelerator: Accelerator, parts: Sequence[Buffer], out: Buffer, op: ReduceOp) -> None:
    """Reduce buffers in rank order: op(parts[0], parts[1], ...). See [Note: Reduction order].

    Args:
        accelerator: Device whose kernels compute.
        parts: One buffer for each rank, in rank order, of `out`'s length and element type. Left as they are, except for
            `out`.
        out: Overwritten with the result. Separate memory, or exactly one of the first two parts.
        op: The reduction. AVG divides by the number of parts.
    """
    if out.dtype in _NARROW and len(parts) > 1:
        _reduce_wide(accelerator, parts, out, op)
        return
    combine = accelerator.kernels()[REDUCE]
    start = next((index for index in (0, 1) if index < len(parts) and _is_same(out, parts[index])), None)
    if start is None:
        out.copy_from(parts[0])
        start = 0
    for index, part in enumerate(parts):
        if index != start:
            combine(out, part, op)
    if op is ReduceOp.AVG and len(parts) > 1:
        accelerator.kernels()[SCALE](out, 1.0 / len(parts))


def _reduce_wide(accelerator: Accelerator, parts: Sequence[Buffer], out: Buffer, op: ReduceOp) -> None:
    combine, scale = accelerator.kernels()[REDUCE], accelerator.kernels()[SCALE]
    wide = accelerator.allocate(min(_CHUNK_NUMEL, out.numel), DType.FLOAT32)
    for offset in range(0, out.numel, _CHUNK_NUMEL):
        numel = min(_CHUNK_NUMEL, out.numel - offset)
        total = wide.view(0, numel)
        total.copy_from(parts[0].view(offset, numel))
        for part in parts[1:]:
            combine(total, part.view(offset, numel), op)
        if op is ReduceOp.AVG:
            scale(total, 1.0 / len(parts))
        out.view(offset, numel).copy_from(total)


def _is_same(one: Buffer, other: Buffer) -> bool:
    return one.numel > 0 and one.data_ptr() == other.data_ptr()
