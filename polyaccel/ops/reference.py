"""The meaning of every op, in float64 numpy, written to be read and not to be fast.

Each function takes float64 arrays of shape (numel,), or matrices, and returns new ones; nothing is modified. A kernel
may differ from these values only by the rounding of its element type, which is what `polyaccel.testkit.kernels` checks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.ops.base import AdagradHyper, AdamHyper, LionHyper, SgdHyper
from polyaccel.types import DType, ReduceOp

Float64s = npt.NDArray[np.float64]


def to_float64(data: bytes, dtype: DType) -> Float64s:
    """What `Buffer.to_bytes` gave, as float64. Exact for every floating type."""
    if dtype is DType.BFLOAT16:
        halves = np.frombuffer(data, dtype=np.uint16).astype(np.uint32)
        return (halves << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(data, dtype=dtype.value).astype(np.float64)


def combine(target: Float64s, source: Float64s, op: ReduceOp) -> Float64s:
    """`op(target, source)`; AVG only adds, for the number of ranks is not known here."""
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
    """Float32 `values` in 16-bit `dtype`: the neighbour below in magnitude, or above if `random` says so.

    The distance from the neighbour below is that share of the spacing which is added to, as `random / 2**32`, to see
    whether it makes a whole one; of a distance in more than 21 bits (float16's subnormals) only those count. Beyond the
    largest number it is to nearest.
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


def adam(
    master: Float64s,
    grad: Float64s,
    exp_avg: Float64s,
    exp_avg_sq: Float64s,
    hyper: AdamHyper,
    grad_scale: float,
) -> tuple[Float64s, Float64s, Float64s]:
    """New (master, exp_avg, exp_avg_sq). Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2."""
    g = grad * grad_scale
    if hyper.decoupled:
        master = master * (1 - hyper.lr * hyper.weight_decay)
    else:
        g = g + hyper.weight_decay * master
    direction, m, v = _moments(g, exp_avg, exp_avg_sq, hyper)
    return master - hyper.lr * direction, m, v


def _moments(
    g: Float64s, exp_avg: Float64s, exp_avg_sq: Float64s, hyper: AdamHyper
) -> tuple[Float64s, Float64s, Float64s]:
    m = hyper.beta1 * exp_avg + (1 - hyper.beta1) * g
    v = hyper.beta2 * exp_avg_sq + (1 - hyper.beta2) * g * g
    correction1 = 1 - hyper.beta1**hyper.step if hyper.bias_correction else 1.0
    correction2 = 1 - hyper.beta2**hyper.step if hyper.bias_correction else 1.0
    return (m / correction1) / (np.sqrt(v / correction2) + hyper.eps), m, v


def sgd(
    master: Float64s, grad: Float64s, momentum: Float64s | None, hyper: SgdHyper, grad_scale: float
) -> tuple[Float64s, Float64s | None]:
    """New (master, momentum). Sutskever et al. 2013 as torch.optim.SGD has it."""
    g = grad * grad_scale + hyper.weight_decay * master
    if momentum is None:
        return master - hyper.lr * g, None
    average = g if hyper.first else hyper.momentum * momentum + (1 - hyper.dampening) * g
    step = g + hyper.momentum * average if hyper.nesterov else average
    return master - hyper.lr * step, average


def adagrad(
    master: Float64s, grad: Float64s, sum_sq: Float64s, hyper: AdagradHyper, grad_scale: float
) -> tuple[Float64s, Float64s]:
    """New (master, sum_sq). Duchi et al. 2011; the rate falls as `lr / (1 + (step - 1) * lr_decay)`."""
    g = grad * grad_scale + hyper.weight_decay * master
    total = sum_sq + g * g
    rate = hyper.lr / (1 + (hyper.step - 1) * hyper.lr_decay)
    return master - rate * g / (np.sqrt(total) + hyper.eps), total


def lion(
    master: Float64s, grad: Float64s, exp_avg: Float64s, hyper: LionHyper, grad_scale: float
) -> tuple[Float64s, Float64s]:
    """New (master, exp_avg). Chen et al. 2023, algorithm 2."""
    g = grad * grad_scale
    direction = np.sign(hyper.beta1 * exp_avg + (1 - hyper.beta1) * g)
    decayed = master * (1 - hyper.lr * hyper.weight_decay)
    return decayed - hyper.lr * direction, hyper.beta2 * exp_avg + (1 - hyper.beta2) * g


def lamb_direction(
    master: Float64s,
    grad: Float64s,
    exp_avg: Float64s,
    exp_avg_sq: Float64s,
    hyper: AdamHyper,
    grad_scale: float,
) -> tuple[Float64s, Float64s, Float64s]:
    """New (direction, exp_avg, exp_avg_sq). You et al. 2020, algorithm 2, before the trust ratio."""
    direction, m, v = _moments(grad * grad_scale, exp_avg, exp_avg_sq, hyper)
    return direction + hyper.weight_decay * master, m, v


def lamb_apply(master: Float64s, direction: Float64s, rate: float) -> Float64s:
    return master - rate * direction


def quantize(source: Float64s, block_numel: int, bits: int) -> tuple[Float64s, Float64s]:
    """(codes, scales), one code an element: not packed."""
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
