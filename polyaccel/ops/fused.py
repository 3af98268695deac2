"""Updates as one sweep over a slice, whatever computes them: which kind, over which buffers, with which constants.

Compiled kernels on the host and on devices get the same constants in the same order, and compute in float32 with one
rounding an operation ([Note: One rounding an operation] in csrc/updates.h). So they agree bitwise, with each other and
with `polyaccel.ops.numpy_kernels`, and moving a state between device and host changes no number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum

from polyaccel.buffer import Buffer
from polyaccel.errors import ShardingError
from polyaccel.ops.base import (
    ADAGRAD,
    ADAM,
    CAST,
    LAMB_APPLY,
    LAMB_DIRECTION,
    LION,
    SGD,
    AdagradHyper,
    AdamHyper,
    KernelTable,
    LionHyper,
    SgdHyper,
    StochasticRounding,
)
from polyaccel.types import DType

COMPUTED_IN_FLOAT32 = frozenset({DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16})


class Update(IntEnum):
    """What a sweep computes. The codes of csrc/kernels.h."""

    ADAM_DECOUPLED = 0
    ADAM_L2 = 1
    SGD_PLAIN = 2
    SGD_FIRST = 3
    SGD_MOMENTUM = 4
    SGD_FIRST_NESTEROV = 5
    SGD_NESTEROV = 6
    ADAGRAD = 7
    LION = 8
    LAMB_DIRECTION = 9
    LAMB_APPLY = 10
    SCALE = 11
    CAST = 12


class FusedKernels(ABC):
    """The optimizers and the cast as sweeps; what `_fits` refuses is left to `fallback`. Each method is an op."""

    def __init__(self, fallback: KernelTable) -> None:
        self._fallback = fallback

    @abstractmethod
    def _fits(self, buffers: Sequence[Buffer | None]) -> bool:
        """Whether a sweep takes these element types, in the memory where they are."""

    @abstractmethod
    def _sweep(
        self,
        kind: int,
        arrays: Sequence[Buffer],
        out: Buffer | None,
        constants: Sequence[float],
        rounding: StochasticRounding | None,
    ) -> None:
        """Update `arrays`, the weights first, and write the weights to `out`. All have the same numel."""

    def _update(
        self,
        kind: int,
        arrays: Sequence[Buffer],
        out: Buffer | None,
        constants: Sequence[float],
        written: int,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """One sweep over `arrays`, the master weights first. `written` has bit i set when array i changes."""
        master = arrays[0]
        for other in (*arrays[1:], *((out,) if out is not None else ())):
            if other.numel != master.numel:
                raise ShardingError(f"{other!r} does not match {master!r}", value=other.numel)
        self._sweep(kind, arrays, out, constants, rounding)
        for index, array in enumerate(arrays):
            if written >> index & 1:
                array.mark_written()
        if out is not None:
            out.mark_written()

    def cast(self, source: Buffer, out: Buffer, rounding: StochasticRounding | None = None) -> None:
        """See `CastFn`."""
        if self._fits((source, out)):
            self._update(Update.CAST, (source,), out, (), 0, rounding)
        else:
            self._fallback[CAST](source, out, rounding)

    def adam(
        self,
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
        arrays = (master, grad, exp_avg, exp_avg_sq)
        if not self._fits((*arrays, out)):
            self._fallback[ADAM](master, grad, exp_avg, exp_avg_sq, out, hyper, grad_scale, rounding)
            return
        decay = 1 - hyper.lr * hyper.weight_decay if hyper.decoupled else hyper.weight_decay
        kind = Update.ADAM_DECOUPLED if hyper.decoupled else Update.ADAM_L2
        self._update(kind, arrays, out, _adam_constants(hyper, decay, grad_scale), 0b1101, rounding)

    def sgd(
        self,
        master: Buffer,
        grad: Buffer,
        momentum: Buffer | None,
        out: Buffer | None,
        hyper: SgdHyper,
        grad_scale: float,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """See `SgdFn`."""
        if not self._fits((master, grad, momentum, out)):
            self._fallback[SGD](master, grad, momentum, out, hyper, grad_scale, rounding)
            return
        constants = (hyper.lr, hyper.momentum, 1 - hyper.dampening, hyper.weight_decay, grad_scale)
        if momentum is None:
            self._update(Update.SGD_PLAIN, (master, grad), out, constants, 0b01, rounding)
            return
        kinds = (
            (Update.SGD_FIRST_NESTEROV, Update.SGD_NESTEROV)
            if hyper.nesterov
            else (Update.SGD_FIRST, Update.SGD_MOMENTUM)
        )
        self._update(kinds[not hyper.first], (master, grad, momentum), out, constants, 0b101, rounding)

    def adagrad(
        self,
        master: Buffer,
        grad: Buffer,
        sum_sq: Buffer,
        out: Buffer | None,
        hyper: AdagradHyper,
        grad_scale: float,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """See `AdagradFn`."""
        if not self._fits((master, grad, sum_sq, out)):
            self._fallback[ADAGRAD](master, grad, sum_sq, out, hyper, grad_scale, rounding)
            return
        rate = hyper.lr / (1 + (hyper.step - 1) * hyper.lr_decay)
        constants = (rate, hyper.eps, hyper.weight_decay, grad_scale)
        self._update(Update.ADAGRAD, (master, grad, sum_sq), out, constants, 0b101, rounding)

    def lion(
        self,
        master: Buffer,
        grad: Buffer,
        exp_avg: Buffer,
        out: Buffer | None,
        hyper: LionHyper,
        grad_scale: float,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """See `LionFn`."""
        if not self._fits((master, grad, exp_avg, out)):
            self._fallback[LION](master, grad, exp_avg, out, hyper, grad_scale, rounding)
            return
        betas = (hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2)
        constants = (*betas, hyper.lr, 1 - hyper.lr * hyper.weight_decay, grad_scale)
        self._update(Update.LION, (master, grad, exp_avg), out, constants, 0b101, rounding)

    def lamb_direction(
        self,
        master: Buffer,
        grad: Buffer,
        exp_avg: Buffer,
        exp_avg_sq: Buffer,
        direction: Buffer,
        hyper: AdamHyper,
        grad_scale: float,
    ) -> None:
        """See `LambDirectionFn`."""
        arrays = (master, grad, exp_avg, exp_avg_sq, direction)
        if not self._fits(arrays):
            self._fallback[LAMB_DIRECTION](master, grad, exp_avg, exp_avg_sq, direction, hyper, grad_scale)
            return
        self._update(
            Update.LAMB_DIRECTION, arrays, None, _adam_constants(hyper, hyper.weight_decay, grad_scale), 0b11101
        )

    def lamb_apply(
        self,
        master: Buffer,
        direction: Buffer,
        out: Buffer | None,
        rate: float,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """See `LambApplyFn`."""
        if not self._fits((master, direction, out)):
            self._fallback[LAMB_APPLY](master, direction, out, rate, rounding)
            return
        self._update(Update.LAMB_APPLY, (master, direction), out, (rate,), 0b01, rounding)


def _adam_constants(hyper: AdamHyper, decay: float, grad_scale: float) -> tuple[float, ...]:
    correction1 = 1 - hyper.beta1**hyper.step if hyper.bias_correction else 1.0
    correction2 = 1 - hyper.beta2**hyper.step if hyper.bias_correction else 1.0
    betas = (hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2)
    return (*betas, 1 / correction1, 1 / math.sqrt(correction2), hyper.eps, hyper.lr, decay, grad_scale)
