"""The ops on numpy arrays: the host without torch, and what the step's own tests run on.

Arithmetic is in float32 (float64 where the master weights are), in chunks that stay in cache. numpy rounds every
operation once and fuses none, so a result never depends on where a slice starts; see [Note: Slices and rounding].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.buffer import Buffer
from polyaccel.errors import ShardingError
from polyaccel.ops.base import (
    ADAGRAD,
    ADAM,
    CAST,
    COMBINE,
    DEQUANTIZE,
    LAMB_APPLY,
    LAMB_DIRECTION,
    LION,
    QUANTIZE,
    SCALE,
    SGD,
    SQUARE_SUMS,
    AdagradHyper,
    AdamHyper,
    KernelTable,
    LionHyper,
    SgdHyper,
    StochasticRounding,
)
from polyaccel.ops.numpy_quantization import dequantize, quantize
from polyaccel.ops.numpy_rounding import write_weights
from polyaccel.types import ReduceOp

Array = npt.NDArray[Any]
_CHUNK_NUMEL = 1 << 16


def numpy_kernels() -> KernelTable:
    """The table of these kernels."""
    return KernelTable(
        "numpy",
        {
            COMBINE: combine,
            SCALE: scale,
            CAST: cast,
            SQUARE_SUMS: square_sums,
            ADAM: adam,
            SGD: sgd,
            ADAGRAD: adagrad,
            LION: lion,
            LAMB_DIRECTION: lamb_direction,
            LAMB_APPLY: lamb_apply,
            QUANTIZE: quantize,
            DEQUANTIZE: dequantize,
        },
    )


_COMBINE: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
    ReduceOp.PROD: np.multiply,
}


def combine(target: Buffer, source: Buffer, op: ReduceOp) -> None:
    """See `CombineFn`. `source` is converted to `target`'s type first."""
    ours: Array = target.raw
    theirs: Array = source.raw
    # Overflow and NaN are ordinary values here, for the step looks for them itself; hence no numpy warnings anywhere.
    with np.errstate(all="ignore"):
        for start in range(0, ours.size, _CHUNK_NUMEL):
            mine = ours[start : start + _CHUNK_NUMEL]
            other = theirs[start : start + _CHUNK_NUMEL].astype(ours.dtype, copy=False)
            _COMBINE[op](mine, other, out=mine)
    target.mark_written()


def scale(target: Buffer, factor: float) -> None:
    """See `ScaleFn`. Raises ShardingError for integers, which a factor would round in silence."""
    if not target.dtype.is_floating:
        raise ShardingError(f"cannot scale {target!r}", cure="scale a floating element type", value=target.dtype.value)
    with np.errstate(all="ignore"):
        np.multiply(target.raw, target.raw.dtype.type(factor), out=target.raw)
    target.mark_written()


def cast(source: Buffer, out: Buffer, rounding: StochasticRounding | None = None) -> None:
    """See `CastFn`."""
    if source.numel != out.numel:
        raise ShardingError(f"{out!r} does not match {source!r}", value=out.numel)
    with np.errstate(all="ignore"):
        for start in range(0, out.numel, _CHUNK_NUMEL):
            span = slice(start, start + _CHUNK_NUMEL)
            write_weights(out.raw[span], source.raw[span], rounding and rounding.at(start))
    out.mark_written()


def square_sums(out: Buffer, pieces: Sequence[tuple[int, Buffer]]) -> None:
    """See `SquareSumsFn`. numpy's pairwise sum in chunks of float64."""
    with np.errstate(all="ignore"):
        for index, piece in pieces:
            for start in range(0, piece.numel, _CHUNK_NUMEL):
                wide = piece.raw[start : start + _CHUNK_NUMEL].astype(np.float64)
                out.raw[index] += np.sum(np.multiply(wide, wide, out=wide))
    out.mark_written()


def _sweep(
    update: Callable[[Array, Array, list[Array]], None],
    master: Buffer,
    grad: Buffer,
    states: Sequence[Buffer],
    out: Buffer | None,
    grad_scale: float,
    rounding: StochasticRounding | None = None,
) -> None:
    """Call `update(master, grad, states)` on chunks in the computing type and store what it changed.

    `grad` is `update`'s own to overwrite, and already multiplied by `grad_scale`.
    """
    for other in (grad, *states, *((out,) if out is not None else ())):
        if other.numel != master.numel:
            raise ShardingError(f"{other!r} does not match {master!r}", value=other.numel)
    compute = np.float64 if master.raw.dtype == np.float64 else np.float32
    kept: list[Array] = [master.raw, *(state.raw for state in states)]
    with np.errstate(all="ignore"):
        for start in range(0, master.numel, _CHUNK_NUMEL):
            span = slice(start, start + _CHUNK_NUMEL)
            pieces = [array[span] for array in kept]
            staged = [piece.astype(compute, copy=False) for piece in pieces]
            scaled = grad.raw[span].astype(compute)
            if grad_scale != 1:
                scaled *= compute(grad_scale)
            update(staged[0], scaled, staged[1:])
            here = rounding and rounding.at(start)
            for i, (piece, result) in enumerate(zip(pieces, staged, strict=True)):
                if result is not piece:
                    write_weights(piece, result, here if i == 0 else None)
            if out is not None:
                write_weights(out.raw[span], staged[0], here)
    for written in (master, *states, *((out,) if out is not None else ())):
        written.mark_written()


def _moments(hyper: AdamHyper, g: Array, states: list[Array]) -> Array:
    """Update both moments with `g`; returns the bias-corrected direction `m / (sqrt(v) + eps)` as a new array."""
    exp_avg, exp_avg_sq = states
    exp_avg *= hyper.beta1
    exp_avg += g * (1 - hyper.beta1)
    exp_avg_sq *= hyper.beta2
    exp_avg_sq += g * g * (1 - hyper.beta2)
    correction1 = 1 - hyper.beta1**hyper.step if hyper.bias_correction else 1.0
    correction2 = 1 - hyper.beta2**hyper.step if hyper.bias_correction else 1.0
    denominator = np.sqrt(exp_avg_sq)
    denominator *= 1 / math.sqrt(correction2)
    denominator += hyper.eps
    direction: Array = exp_avg * (1 / correction1)
    direction /= denominator
    return direction


def adam(
    master: Buffer,
    grad: Buffer,
    exp_avg: Buffer,
    exp_avg_sq: Buffer,
    out: Buffer | None,
    hyper: AdamHyper,
    grad_scale: float,
    rounding: StochasticRounding | None = None,
) -> None:
    """See `AdamFn`."""

    def update(p: Array, g: Array, states: list[Array]) -> None:
        if hyper.decoupled:
            p *= 1 - hyper.lr * hyper.weight_decay
        else:
            g += p * hyper.weight_decay
        p -= _moments(hyper, g, states) * hyper.lr

    _sweep(update, master, grad, (exp_avg, exp_avg_sq), out, grad_scale, rounding)


def sgd(
    master: Buffer,
    grad: Buffer,
    momentum: Buffer | None,
    out: Buffer | None,
    hyper: SgdHyper,
    grad_scale: float,
    rounding: StochasticRounding | None = None,
) -> None:
    """See `SgdFn`."""

    def update(p: Array, g: Array, states: list[Array]) -> None:
        g += p * hyper.weight_decay
        if states:
            (average,) = states
            if hyper.first:
                average[:] = g
            else:
                average *= hyper.momentum
                average += g * (1 - hyper.dampening)
            g = g + average * hyper.momentum if hyper.nesterov else average
        p -= g * hyper.lr

    _sweep(update, master, grad, () if momentum is None else (momentum,), out, grad_scale, rounding)


def adagrad(
    master: Buffer,
    grad: Buffer,
    sum_sq: Buffer,
    out: Buffer | None,
    hyper: AdagradHyper,
    grad_scale: float,
    rounding: StochasticRounding | None = None,
) -> None:
    """See `AdagradFn`."""
    rate = hyper.lr / (1 + (hyper.step - 1) * hyper.lr_decay)

    def update(p: Array, g: Array, states: list[Array]) -> None:
        (total,) = states
        g += p * hyper.weight_decay
        total += g * g
        p -= g * rate / (np.sqrt(total) + hyper.eps)

    _sweep(update, master, grad, (sum_sq,), out, grad_scale, rounding)


def lion(
    master: Buffer,
    grad: Buffer,
    exp_avg: Buffer,
    out: Buffer | None,
    hyper: LionHyper,
    grad_scale: float,
    rounding: StochasticRounding | None = None,
) -> None:
    """See `LionFn`."""

    def update(p: Array, g: Array, states: list[Array]) -> None:
        (average,) = states
        direction = np.sign(average * hyper.beta1 + g * (1 - hyper.beta1))
        p *= 1 - hyper.lr * hyper.weight_decay
        p -= direction * hyper.lr
        average *= hyper.beta2
        average += g * (1 - hyper.beta2)

    _sweep(update, master, grad, (exp_avg,), out, grad_scale, rounding)


def lamb_direction(
    master: Buffer,
    grad: Buffer,
    exp_avg: Buffer,
    exp_avg_sq: Buffer,
    direction: Buffer,
    hyper: AdamHyper,
    grad_scale: float,
) -> None:
    """See `LambDirectionFn`. The decay is always added to the direction; `hyper.decoupled` says nothing here."""

    def update(p: Array, g: Array, states: list[Array]) -> None:
        target = states[2]
        target[:] = _moments(hyper, g, states[:2])
        target += p * hyper.weight_decay

    _sweep(update, master, grad, (exp_avg, exp_avg_sq, direction), None, grad_scale)


def lamb_apply(
    master: Buffer, direction: Buffer, out: Buffer | None, rate: float, rounding: StochasticRounding | None = None
) -> None:
    """See `LambApplyFn`."""

    def update(p: Array, step: Array, states: list[Array]) -> None:
        p -= step * rate

    _sweep(update, master, direction, (), out, 1.0, rounding)
