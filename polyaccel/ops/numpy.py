"""The ops on numpy arrays, for hosts without torch and for the tests of the step.

Arithmetic is in float32 (float64 where the master weights are), in chunks that stay in cache. numpy rounds every
operation once and fuses none, so a result never depends on where a slice starts; see
[Note: Slice-independent rounding].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import ReduceOp
from polyaccel.errors import ShardingError
from polyaccel.ops.base import LARGEST_CODE, ArrayMath, KernelTable, Rule, StochasticRounding, by_op, code_bits
from polyaccel.ops.numpy_block_codes import BLOCK_CODE_KERNELS
from polyaccel.ops.rounding import bfloat16_bits, float16_bits, random_bits

Array = npt.NDArray[Any]
_CHUNK_NUMEL = 1 << 16


def numpy_kernels() -> KernelTable:
    """Return the table of these kernels."""
    dense = by_op(combine, scale, cast, square_sums, update, quantize, dequantize)
    return KernelTable("numpy", {**dense, **BLOCK_CODE_KERNELS})


_COMBINE: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
    ReduceOp.PROD: np.multiply,
}


def combine(target: Buffer, source: Buffer, op: ReduceOp) -> None:
    """Implement `ReduceFn`. `source` is converted to `target`'s type first."""
    ours: Array = target.raw
    theirs: Array = source.raw
    # Overflow and NaN are ordinary values here, for the step looks for them itself; hence no numpy warnings anywhere.
    with np.errstate(all="ignore"):
        for start in range(0, ours.size, _CHUNK_NUMEL):
            mine = ours[start : start + _CHUNK_NUMEL]
            other = theirs[start : start + _CHUNK_NUMEL].astype(ours.dtype, copy=False)
            _COMBINE[op](mine, other, out=mine)
    target.bump_version()


def scale(target: Buffer, factor: float) -> None:
    """Implement `ScaleFn`. Raises ShardingError for integers, which a factor would round in silence."""
    if not target.dtype.is_floating:
        raise ShardingError(f"cannot scale {target!r}", hint="scale a floating element type", value=target.dtype.value)
    with np.errstate(all="ignore"):
        np.multiply(target.raw, target.raw.dtype.type(factor), out=target.raw)
    target.bump_version()


def cast(source: Buffer, out: Buffer, rounding: StochasticRounding | None = None) -> None:
    """Implement `CastFn`. Raises ShardingError for buffers of different lengths."""
    if source.numel != out.numel:
        raise ShardingError(f"{out!r} does not match {source!r}", value=out.numel)
    with np.errstate(all="ignore"):
        for start in range(0, out.numel, _CHUNK_NUMEL):
            span = slice(start, start + _CHUNK_NUMEL)
            write_weights(out.raw[span], source.raw[span], rounding and rounding.at(start))
    out.bump_version()


def square_sums(out: Buffer, pieces: Sequence[tuple[int, Buffer]]) -> None:
    """Implement `SquareSumsFn`: numpy's pairwise sum in chunks of float64."""
    with np.errstate(all="ignore"):
        for index, piece in pieces:
            for start in range(0, piece.numel, _CHUNK_NUMEL):
                wide = piece.raw[start : start + _CHUNK_NUMEL].astype(np.float64)
                out.raw[index] += np.sum(np.multiply(wide, wide, out=wide))
    out.bump_version()


class NumpyMath(ArrayMath):
    """`ArrayMath` on numpy arrays."""

    def mul(self, a: Array, b: Any, slot: int = 0) -> Array:
        product: Array = a * b
        return product

    def sqrt(self, a: Array, slot: int = 0) -> Array:
        root: Array = np.sqrt(a)
        return root

    def abs(self, a: Array, slot: int = 0) -> Array:
        return np.abs(a)

    def maximum(self, a: Array, b: Array) -> Array:
        largest: Array = np.maximum(a, b)
        return largest

    def sign(self, a: Array) -> Array:
        return np.sign(a)

    def plus_decay(self, a: Array, weights: Array, decay: float) -> Array:
        a += weights * decay
        return a

    def choose(self, condition: float, a: Array, b: Array) -> Array:
        return a if condition else b


def update(
    rule: Rule,
    master: Buffer,
    grad: Buffer,
    states: Sequence[Buffer],
    out: Buffer | None = None,
    grad_scale: float = 1.0,
    rounding: StochasticRounding | None = None,
) -> None:
    """Implement `UpdateFn`. Chunks are computed in place where their type is that of the arithmetic."""
    rule.check(master, grad, states, out)
    formula, constants, math = rule.formula, rule.constants, NumpyMath()
    compute = np.float64 if master.raw.dtype == np.float64 else np.float32
    arrays: list[Array] = [master.raw, *(state.raw for state in states)]
    read_count = 1 + len(formula.reads)
    with np.errstate(all="ignore"):
        for start in range(0, master.numel, _CHUNK_NUMEL):
            span = slice(start, start + _CHUNK_NUMEL)
            pieces = [array[span] for array in arrays]
            weights, *staged = (piece.astype(compute, copy=False) for piece in pieces[:read_count])
            scaled = grad.raw[span].astype(compute)
            if grad_scale != 1:
                scaled *= compute(grad_scale)
            results = formula.arrays(math, constants, weights, scaled, *staged)
            here = rounding and rounding.at(start)
            for i, (piece, result) in enumerate(zip(pieces, results, strict=True)):
                if result is not piece and (i or formula.writes_weights):
                    write_weights(piece, result, None if i else here)
            if out is not None:
                write_weights(out.raw[span], results[0], here)
    rule.bump_version(master, states, out)


def write_weights(target: Array, values: Array, rounding: StochasticRounding | None) -> None:
    """Assign values in the type of the target.

    Args:
        target: Overwritten.
        values: Shape of `target`.
        rounding: Rounds to 16 bits stochastically; its `start` is the index of the first element. None rounds to
            nearest even, as do all other widths.
    """
    if rounding is None or target.itemsize != 2:
        target[:] = values
        return
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    random = random_bits(rounding.key, rounding.start, bits.size)
    halves_of = float16_bits if target.dtype == np.float16 else bfloat16_bits
    target.view(np.uint16)[:] = halves_of(bits, random, np.where)


def quantize(source: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
    """Implement `QuantizeFn`."""
    bits = code_bits(source, codes, scales, block_numel)
    with np.errstate(all="ignore"):
        blocks = _blocks(source.raw.astype(np.float32), block_numel)
        largest = np.max(np.abs(blocks), axis=1, initial=0)  # NaN if there is one
        scale = np.where(np.isfinite(largest), largest / np.float32(LARGEST_CODE[bits]), np.float32(np.nan))
        rounded = np.rint(blocks / np.where(scale > 0, scale, np.float32(np.nan))[:, None])
        values = np.nan_to_num(rounded).clip(-LARGEST_CODE[bits], LARGEST_CODE[bits]).astype(np.int8).reshape(-1)
    scales.raw[:] = scale
    if bits == 8:
        codes.raw[:] = values[: source.numel]
    else:
        pairs = (values[: 2 * codes.numel].view(np.uint8) & 15).reshape(-1, 2)
        codes.raw[:] = pairs[:, 0] | pairs[:, 1] << 4
    codes.bump_version()
    scales.bump_version()


def dequantize(out: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
    """Implement `DequantizeFn`."""
    values = codes.raw
    if code_bits(out, codes, scales, block_numel) == 4:
        low, high = codes.raw & 15, codes.raw >> 4
        values = (np.stack((low, high), axis=1).reshape(-1)[: out.numel] ^ 8).astype(np.int8) - 8
    with np.errstate(all="ignore"):
        blocks = _blocks(values.astype(np.float32), block_numel) * scales.raw[:, None]
        out.raw[:] = blocks.reshape(-1)[: out.numel]
    out.bump_version()


def _blocks(values: Array, block_numel: int) -> Array:
    """Shape (blocks, block_numel), the last block filled up with zeros."""
    missing = -values.size % block_numel
    return np.concatenate((values, np.zeros(missing, values.dtype))).reshape(-1, block_numel)
