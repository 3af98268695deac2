"""The meaning of every op, in float64 numpy, written to be read and not to be fast.

Each function takes float64 arrays of shape (numel,), or matrices, and returns new ones; nothing is modified. A kernel
may differ from these values only by the rounding of its element type: `polyaccel.testkit.kernels.contract` checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.core.types import DType, ReduceOp
from polyaccel.ops.base import Rule
from polyaccel.ops.numpy import NumpyMath

Float64s = npt.NDArray[np.float64]


def to_float64(data: bytes, dtype: DType) -> Float64s:
    """The numbers in `data`, which `Buffer.to_bytes` gave, as float64. Exact for every floating type."""
    if dtype is DType.BFLOAT16:
        halves = np.frombuffer(data, dtype=np.uint16).astype(np.uint32)
        return (halves << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(data, dtype=dtype.value).astype(np.float64)


def combine(target: Float64s, source: Float64s, op: ReduceOp) -> Float64s:
    """`op(target, source)`; AVG only adds, for the number of ranks is not passed to a kernel."""
    functions: dict[ReduceOp, Any] = {
        ReduceOp.SUM: np.add,
        ReduceOp.AVG: np.add,
        ReduceOp.MAX: np.maximum,
        ReduceOp.MIN: np.minimum,
        ReduceOp.PROD: np.multiply,
    }
    result: Float64s = functions[op](target, source)
    return result


def scale(target: Float64s, factor: float) -> Float64s:
    return target * factor


def round_stochastically(values: Float64s, dtype: DType, random: npt.NDArray[np.uint32]) -> Float64s:
    """Float32 `values` in 16-bit `dtype`: of each value's two neighbours, the one that `random` chooses.

    The value's distance from the neighbour below, as a share of the spacing and cut to 21 bits, plus `random / 2**32`:
    from 1 on the neighbour above is taken. Beyond the largest number rounding is to nearest.
    """
    precision, smallest, top = (7, -133, 120) if dtype is DType.BFLOAT16 else (10, -24, 5)
    most = 2.0 ** (top + precision + 1) - 2.0**top
    magnitude = np.abs(values)
    is_within = magnitude <= most
    inner = np.where(is_within, magnitude, 0.0)
    spacing = np.exp2(np.maximum(np.frexp(inner)[1] - 1 - precision, smallest))
    distance = np.floor(inner / spacing * 2.0**21) / 2.0**21
    beyond = np.where(magnitude < most + 2.0 ** (top - 1), most, magnitude * np.inf)
    result: Float64s = np.where(is_within, np.floor(distance + random / 2.0**32) * spacing, beyond)
    return np.copysign(result, values)


def square_sum(piece: Float64s) -> float:
    return float(np.sum(piece * piece))


def update(
    rule: Rule, master: Float64s, grad: Float64s, states: Sequence[Float64s], grad_scale: float
) -> tuple[Float64s, ...]:
    """(new master, every new state), for the states that the rule's formula reads."""
    found: tuple[Float64s, ...] = rule.formula.reference(
        NumpyMath(), rule.settings, rule.step, master, grad * grad_scale, *states
    )
    return found


def quantize(source: Float64s, block_numel: int, bits: int) -> tuple[Float64s, Float64s]:
    """(codes, scales), with one code an element even for 4 bits."""
    most = 2 ** (bits - 1) - 1
    codes, scales = np.zeros(source.size), np.zeros(-(-source.size // block_numel))
    for index, start in enumerate(range(0, source.size, block_numel)):
        block = source[start : start + block_numel]
        largest = np.max(np.abs(block))
        scales[index] = largest / most if np.isfinite(largest) else np.nan
        if scales[index] > 0:
            codes[start : start + block_numel] = np.rint(block / scales[index])
    return codes, scales


def dequantize(codes: Float64s, scales: Float64s, block_numel: int) -> Float64s:
    return codes * np.repeat(scales, block_numel)[: codes.size]


def linear(x: Float64s, weight: Float64s, bias: Float64s | None) -> Float64s:
    result: Float64s = x @ weight.T
    return result if bias is None else result + bias


def linear_input_grad(grad: Float64s, weight: Float64s) -> Float64s:
    result: Float64s = grad @ weight
    return result


def linear_weight_grad(grad: Float64s, x: Float64s) -> Float64s:
    result: Float64s = grad.T @ x
    return result


def matmul(left: Float64s, right: Float64s) -> Float64s:
    result: Float64s = left @ right
    return result


def matmul_left_grad(grad: Float64s, right: Float64s) -> Float64s:
    result: Float64s = grad @ right.T
    return result


def matmul_right_grad(left: Float64s, grad: Float64s) -> Float64s:
    result: Float64s = left.T @ grad
    return result


def grouped_linear(rows: Float64s, weights: Float64s, counts: Sequence[int]) -> Float64s:
    pairs = zip(_groups(rows, counts), weights, strict=True)
    result: Float64s = np.concatenate([group @ weight.T for group, weight in pairs])
    return result


def grouped_input_grad(grad: Float64s, weights: Float64s, counts: Sequence[int]) -> Float64s:
    pairs = zip(_groups(grad, counts), weights, strict=True)
    result: Float64s = np.concatenate([group @ weight for group, weight in pairs])
    return result


def grouped_weight_grad(grad: Float64s, rows: Float64s, counts: Sequence[Sequence[int]]) -> Float64s:
    sizes = [sum(parts) for parts in counts]
    result: Float64s = np.stack([a.T @ b for a, b in zip(_groups(grad, sizes), _groups(rows, sizes), strict=True)])
    return result


def _groups(rows: Float64s, counts: Sequence[int]) -> list[Float64s]:
    return np.split(rows, np.cumsum(counts)[:-1])
