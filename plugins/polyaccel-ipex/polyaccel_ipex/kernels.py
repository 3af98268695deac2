"""The extension's fused optimizer steps as ops of polyaccel. What a step does not cover is left to the host's own.

[Note: Vector-aligned slices]
The steps fuse multiply and add in their vector loops and not in the scalar tails, of which each thread has one, so that
an element's bits would depend on where a slice ends. Hence a call gets a number of elements that divides into whole
vectors for each thread; what is left goes in grains, which one thread takes alone, and the last of them padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import intel_extension_for_pytorch  # type: ignore[import-not-found]  # its import registers torch.ops.torch_ipex
import torch

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.ops.base import CAST, UPDATE, KernelTable, Rule, StochasticRounding
from polyaccel.ops.optimizers import ADAGRAD, ADAM, ADAMW, MOMENTUM, NESTEROV, SGD

_GRAIN_NUMEL = 512  # of the extension's loops; whole vectors of any type


def ipex_kernels(fallback: KernelTable) -> KernelTable:
    """`fallback` with these kernels in front of it."""
    kernels = _IpexKernels(fallback)
    name = f"ipex {intel_extension_for_pytorch.__version__}"
    return fallback.replaced(name, {UPDATE: kernels.update})


class _IpexKernels:
    """The op `update`."""

    def __init__(self, fallback: KernelTable) -> None:
        self._fallback = fallback
        self._steps: Any = torch.ops.torch_ipex
        self._nothing = torch.empty(0)  # what the extension takes for "no tensor"

    def _fits(self, rule: Rule, master: Buffer, grad: Buffer, states: Sequence[Buffer], out: Buffer | None) -> bool:
        """All in float32, or with bfloat16 gradients and parameters; and an update that the extension has."""
        if any(state.dtype is not DType.FLOAT32 for state in (master, *states)):
            return False
        if rule.formula in (ADAMW, ADAM):
            has = rule.settings["bias_correction"] != 0
        elif rule.formula in (SGD, MOMENTUM, NESTEROV):
            has = (
                rule.step != 1
            )  # the extension takes the first step's momentum to be missing, and would make a new one
        else:  # with bfloat16 gradients the extension rounds too often
            has = rule.formula is ADAGRAD and grad.dtype is DType.FLOAT32
        return (
            has
            and grad.dtype in (DType.FLOAT32, DType.BFLOAT16)
            and (out.dtype is DType.BFLOAT16 is grad.dtype if out is not None else grad.dtype is DType.FLOAT32)
        )

    def _sweep(self, step: Callable[..., Any], *buffers: Buffer | None) -> None:
        """`step` on the tensors of `buffers`, in portions that are whole vectors. See [Note: Vector-aligned slices]."""
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
                buffer.bump_version()

    def update(
        self,
        rule: Rule,
        master: Buffer,
        grad: Buffer,
        states: Sequence[Buffer],
        out: Buffer | None = None,
        grad_scale: float = 1.0,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """See `UpdateFn`."""
        if (wide := _widened(master)) is not master and rule.formula.writes_weights:
            self.update(rule, wide, grad, states, out, grad_scale, rounding)
            self._fallback[CAST](wide, master, rounding)
            return
        if grad_scale != 1 or not self._fits(rule, master, grad, states, out):
            self._fallback[UPDATE](rule, master, grad, states, out, grad_scale, rounding)
            return
        rule.check(master, grad, states, out)
        self._sweep(self._step(rule, master), master, grad, *states, *(() if states else (None,)), out)
        if out is not None and rounding is not None:
            # The extension rounds to nearest; where chance is asked for, the parameters are written once more.
            self._fallback[CAST](master, out, rounding)

    def _step(self, rule: Rule, master: Buffer) -> Callable[..., Any]:
        """The extension's step on (weights, gradient, states or nothing, parameters)."""
        s = rule.settings
        if rule.formula in (ADAMW, ADAM):
            decay = s["weight_decay"]
            if rule.formula is ADAMW:  # the step's decay is that of Adam: AdamW's is a product before it
                master.raw.mul_(1 - s["lr"] * decay)
                decay = 0.0
            numbers = (float(rule.step), s["beta1"], s["beta2"], s["lr"], decay, s["eps"])
            return lambda p, g, m, v, low: self._steps.adam_fused_step(p, m, v, self._nothing, g, low, False, *numbers)
        if rule.formula is ADAGRAD:
            rates = (float(rule.step), s["lr"], s["weight_decay"], s["lr_decay"], s["eps"])
            return lambda p, g, total, low: self._steps.adagrad_fused_step(p, g, total, low, *rates)
        terms = (s["momentum"], s["lr"], s["weight_decay"], s["dampening"], bool(s["nesterov"]))
        return lambda p, g, average, low: self._steps.sgd_fused_step(
            p, g, average if average.numel() else None, low, *terms
        )


def _widened(master: Buffer) -> Buffer:
    """`master`, or a copy of it in float32 where it has 16 bits."""
    return wrap_torch(master.raw.float()) if master.dtype in (DType.BFLOAT16, DType.FLOAT16) else master
