"""Matrix products by oneDNN, which comes with torch, and their measurement against torch's own.

torch multiplies float32 matrices on a CPU by MKL where it was built with it, and MKL takes a generic path on processors
that are not Intel's, at half of oneDNN's speed. Each product is measured and chosen by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from logging import getLogger
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polyaccel.ops.base import (
    LINEAR,
    LINEAR_INPUT_GRAD,
    LINEAR_WEIGHT_GRAD,
    MATMUL,
    MATMUL_LEFT_GRAD,
    MATMUL_RIGHT_GRAD,
    KernelTable,
    Op,
)
from polyaccel.ops.matmul_autotune import LEAST_SPEEDUP, load_measured, save_measured

log = getLogger(__name__)

_SHAPES = ((128, 512, 512), (256, 512, 1024))
"""Rows, inputs and outputs of the measured products: a millisecond each on one core, so that many repetitions fit."""
_MEASURE_S = 0.25
_FEWEST_ROUNDS = 3
_STEADY = 1.5
"""The largest ratio of median to least time at which a measurement is worth keeping: beyond, others used the cores."""

Run = Callable[[], Tensor]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `LinearFn`. Like all functions of this module it takes float32 tensors on the CPU."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def linear_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """See `LinearInputGradFn`."""
    return linear(grad, weight.t(), None)


def linear_weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """See `LinearWeightGradFn`."""
    return linear(grad.t(), x.t(), None)


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """See `MatmulFn`."""
    return linear(left, right.t(), None)


def matmul_left_grad(grad: Tensor, right: Tensor) -> Tensor:
    """See `MatmulLeftGradFn`."""
    return linear(grad, right, None)


def matmul_right_grad(left: Tensor, grad: Tensor) -> Tensor:
    """See `MatmulRightGradFn`."""
    return linear(left.t(), grad.t(), None)


def onednn_kernels() -> KernelTable:
    """The table of these kernels; empty where torch was built without oneDNN."""
    if not (torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return KernelTable("oneDNN", {})
    return KernelTable(
        "oneDNN",
        {
            LINEAR: linear,
            LINEAR_INPUT_GRAD: linear_input_grad,
            LINEAR_WEIGHT_GRAD: linear_weight_grad,
            MATMUL: matmul,
            MATMUL_LEFT_GRAD: matmul_left_grad,
            MATMUL_RIGHT_GRAD: matmul_right_grad,
        },
    )


def faster_kernels() -> KernelTable:
    """Return kernels at least `LEAST_SPEEDUP` times torch's speed; measured once a machine."""
    return _faster(torch.get_num_threads())


@cache
def _faster(threads: int) -> KernelTable:
    table = onednn_kernels()
    known = load_measured(threads)
    if known is not None:
        speedups = dict(known.speedups)
    elif not set(table):
        return table
    else:
        try:
            speedups, is_steady = measure_speedups(table)
        except RuntimeError as error:  # a build of torch that has the op, and cannot run it
            log.warning("oneDNN's matrix products are not used: %s", error)
            return table.only(())
        if is_steady:
            save_measured(threads, speedups)
    chosen = table.only([op for op in table if speedups[op.name] >= LEAST_SPEEDUP])
    log.debug("matrix products by oneDNN: %s of %s", [op.name for op in chosen], speedups)
    return chosen


def measure_speedups(table: KernelTable, within_s: float = _MEASURE_S) -> tuple[dict[str, float], bool]:
    """Return kernels' least speedups over shapes, by best alternating times, and whether undisturbed."""
    with torch.no_grad():
        pairs = _pairs(table)
        for _, own, ours in pairs:
            own()
            ours()
        times: list[tuple[list[float], list[float]]] = [([], []) for _ in pairs]
        until = perf_counter() + within_s
        rounds = 0
        while rounds < _FEWEST_ROUNDS or perf_counter() < until:
            rounds += 1
            for (_, own, ours), (spent_by_own, spent_by_ours) in zip(pairs, times, strict=True):
                spent_by_own.append(_seconds(own))
                spent_by_ours.append(_seconds(ours))
    speedups: dict[str, float] = {}
    for (op, _, _), (spent_by_own, spent_by_ours) in zip(pairs, times, strict=True):
        speedup = min(spent_by_own) / min(spent_by_ours)
        speedups[op.name] = min(speedup, speedups.get(op.name, speedup))
    is_steady = all(median(spent) <= _STEADY * min(spent) for both in times for spent in both)
    return speedups, is_steady


def _pairs(table: KernelTable) -> list[tuple[Op[Any], Run, Run]]:
    """Each product of each shape as torch does it and as its kernel does."""
    generator = torch.Generator().manual_seed(0)
    pairs: list[tuple[Op[Any], Run, Run]] = []
    for rows, inputs, outputs in _SHAPES:
        x, weight, grad = (
            torch.randn(shape, generator=generator) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )
        right = weight.t().contiguous()
        pairs += [
            (LINEAR, partial(functional.linear, x, weight), partial(table[LINEAR], x, weight, None)),
            (LINEAR_INPUT_GRAD, partial(torch.mm, grad, weight), partial(table[LINEAR_INPUT_GRAD], grad, weight)),
            (LINEAR_WEIGHT_GRAD, partial(torch.mm, grad.t(), x), partial(table[LINEAR_WEIGHT_GRAD], grad, x)),
            (MATMUL, partial(torch.mm, x, right), partial(table[MATMUL], x, right)),
            (MATMUL_LEFT_GRAD, partial(torch.mm, grad, right.t()), partial(table[MATMUL_LEFT_GRAD], grad, right)),
            (MATMUL_RIGHT_GRAD, partial(torch.mm, x.t(), grad), partial(table[MATMUL_RIGHT_GRAD], x, grad)),
        ]
    return pairs


def _seconds(run: Run) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
