"""The extension's fused optimizer steps as ops of polyaccel. What a step does not cover is left to the host's own.

[Note: Whole vectors only]
The steps fuse multiply and add in their vector loops and not in the scalar tails, of which each thread has one, so that
an element's bits would depend on where a slice ends. Hence a call gets a number of elements that divides into whole
vectors for each thread; what is left goes in grains, which one thread takes alone, and the last of them padded.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import intel_extension_for_pytorch  # type: ignore[import-not-found]  # its import registers torch.ops.torch_ipex
import torch

from polyaccel.accelerators.torch_memory import wrap_torch
from polyaccel.buffer import Buffer
from polyaccel.errors import ShardingError
from polyaccel.ops.base import (
    ADAGRAD,
    ADAM,
    CAST,
    SGD,
    AdagradHyper,
    AdamHyper,
    KernelTable,
    SgdHyper,
    StochasticRounding,
)
from polyaccel.types import DType

_GRAIN_NUMEL = 512  # of the extension's loops; whole vectors of any type


def ipex_kernels(fallback: KernelTable) -> KernelTable:
    """`fallback` with these kernels in front of it."""
    kernels = _IpexKernels(fallback)
    name = f"ipex {intel_extension_for_pytorch.__version__}"
    return fallback.replaced(name, {ADAM: kernels.adam, SGD: kernels.sgd, ADAGRAD: kernels.adagrad})


class _IpexKernels:
    """The kernels as methods; each has the signature of its op."""

    def __init__(self, fallback: KernelTable) -> None:
        self._fallback = fallback
        self._steps: Any = torch.ops.torch_ipex
        self._nothing = torch.empty(0)  # what the extension takes for "no such tensor"

    def _fits(self, grad: Buffer, out: Buffer | None, *states: Buffer) -> bool:
        """All in float32, or with bfloat16 gradients and parameters."""
        if any(state.dtype is not DType.FLOAT32 for state in states):
            return False
        return grad.dtype in (DType.FLOAT32, DType.BFLOAT16) and (
            out.dtype is DType.BFLOAT16 is grad.dtype if out is not None else grad.dtype is DType.FLOAT32
        )

    def _sweep(self, step: Callable[..., Any], *buffers: Buffer | None) -> None:
        """`step` on the tensors of `buffers`, in portions that are whole vectors. See [Note: Whole vectors only]."""
        for other in buffers[1:]:
            if other is not None and buffers[0] is not None and other.numel != buffers[0].numel:
                raise ShardingError(f"{other!r} does not match {buffers[0]!r}", value=other.numel)
        tensors = [None if buffer is None else buffer.raw for buffer in buffers]
        numel = next(tensor.numel() for tensor in tensors if tensor is not None)
        each = _GRAIN_NUMEL * torch.get_num_threads()
        cuts = [0, *range(numel - numel % each, numel, _GRAIN_NUMEL), numel]
        for start, stop in pairwise(cuts):
            pieces = [self._nothing if tensor is None else tensor[start:stop] for tensor in tensors]
            if (stop - start) % _GRAIN_NUMEL == 0:
                if stop > start:
                    step(*pieces)
                continue
            padded = [torch.ones(_GRAIN_NUMEL, dtype=piece.dtype) if piece.numel() else piece for piece in pieces]
            for room, piece in zip(padded, pieces, strict=True):
                room[: piece.numel()] = piece
            step(*padded)
            for room, piece in zip(padded, pieces, strict=True):
                piece.copy_(room[: piece.numel()])
        for buffer in buffers:
            if buffer is not None:
                buffer.mark_written()

    def _round(self, master: Buffer, out: Buffer | None, rounding: StochasticRounding | None) -> None:
        """The extension rounds to nearest; where chance is asked for, the parameters are written once more."""
        if out is not None and rounding is not None:
            self._fallback[CAST](master, out, rounding)

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
        """See `AdamFn`. The step's decay is that of Adam: AdamW's is a product before it."""
        if (wide := _widened(master)) is not master:
            self.adam(wide, grad, exp_avg, exp_avg_sq, out, hyper, grad_scale, rounding)
            self._fallback[CAST](wide, master, rounding)
            return
        fits = self._fits(grad, out, master, exp_avg, exp_avg_sq) and hyper.bias_correction
        if not fits or grad_scale != 1:
            self._fallback[ADAM](master, grad, exp_avg, exp_avg_sq, out, hyper, grad_scale, rounding)
            return
        decay = hyper.weight_decay
        if hyper.decoupled:
            master.raw.mul_(1 - hyper.lr * decay)
            decay = 0.0
        numbers = (float(hyper.step), hyper.beta1, hyper.beta2, hyper.lr, decay, hyper.eps)

        def step(p: Any, g: Any, m: Any, v: Any, low: Any) -> None:
            self._steps.adam_fused_step(p, m, v, self._nothing, g, low, False, *numbers)

        self._sweep(step, master, grad, exp_avg, exp_avg_sq, out)
        self._round(master, out, rounding)

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
        if (wide := _widened(master)) is not master:
            self.sgd(wide, grad, momentum, out, hyper, grad_scale, rounding)
            self._fallback[CAST](wide, master, rounding)
            return
        states = (master,) if momentum is None else (master, momentum)
        # The extension takes the first step's momentum to be missing, and would make a new one.
        if not self._fits(grad, out, *states) or grad_scale != 1 or hyper.first:
            self._fallback[SGD](master, grad, momentum, out, hyper, grad_scale, rounding)
            return
        numbers = (hyper.momentum, hyper.lr, hyper.weight_decay, hyper.dampening, hyper.nesterov)

        def step(p: Any, g: Any, average: Any, low: Any) -> None:
            self._steps.sgd_fused_step(p, g, average if average.numel() else None, low, *numbers)

        self._sweep(step, master, grad, momentum, out)
        self._round(master, out, rounding)

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
        """See `AdagradFn`. With bfloat16 gradients the extension rounds too often."""
        if (wide := _widened(master)) is not master:
            self.adagrad(wide, grad, sum_sq, out, hyper, grad_scale, rounding)
            self._fallback[CAST](wide, master, rounding)
            return
        fits = self._fits(grad, out, master, sum_sq) and grad.dtype is DType.FLOAT32
        if not fits or grad_scale != 1:
            self._fallback[ADAGRAD](master, grad, sum_sq, out, hyper, grad_scale, rounding)
            return
        numbers = (float(hyper.step), hyper.lr, hyper.weight_decay, hyper.lr_decay, hyper.eps)

        def step(p: Any, g: Any, total: Any, low: Any) -> None:
            self._steps.adagrad_fused_step(p, g, total, low, *numbers)

        self._sweep(step, master, grad, sum_sq, out)
        self._round(master, out, rounding)


def _widened(master: Buffer) -> Buffer:
    """`master`, or a copy of it in float32 where it has 16 bits."""
    return wrap_torch(master.raw.float()) if master.dtype in (DType.BFLOAT16, DType.FLOAT16) else master
