"""The accelerator plugin: polyaccel's own for Ascend NPUs with torch_npu's fused step. Not run on hardware."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar

from polyaccel.accelerators.base import Probe
from polyaccel.accelerators.npu import NpuAccelerator
from polyaccel.ops.base import ADAM, CAST, AdamFn, AdamHyper, KernelTable, StochasticRounding
from polyaccel.types import DType


class AscendAccelerator(NpuAccelerator):
    """`torch.npu` with HCCL and the fused AdamW step. Not run on hardware."""

    API_VERSION: ClassVar[tuple[int, int]] = (1, 0)
    name: ClassVar[str] = "ascend"

    @classmethod
    def probe(cls) -> Probe:
        found = super().probe()
        return replace(found, priority=found.priority + 1)

    def kernels(self) -> KernelTable:
        table = super().kernels()
        return table.replaced("torch_npu", {ADAM: fused_adamw(import_module("torch_npu"), table)})


def fused_adamw(torch_npu: Any, table: KernelTable) -> AdamFn:
    """The op `adam` by `torch_npu.npu_apply_adam_w`; what that does not cover is left to `table`."""

    def adam(
        master: Any,
        grad: Any,
        exp_avg: Any,
        exp_avg_sq: Any,
        out: Any,
        hyper: AdamHyper,
        grad_scale: float,
        rounding: StochasticRounding | None = None,
    ) -> None:
        if master.dtype in (DType.BFLOAT16, DType.FLOAT16):
            from polyaccel.accelerators.torch_memory import wrap_torch

            wide = wrap_torch(master.raw.float())
            adam(wide, grad, exp_avg, exp_avg_sq, out, hyper, grad_scale, rounding)
            table[CAST](wide, master, rounding)
            return
        buffers = (master, grad, exp_avg, exp_avg_sq)
        fits = all(buffer.dtype is DType.FLOAT32 for buffer in (master, exp_avg, exp_avg_sq))
        fits = fits and grad.dtype is not DType.FLOAT64 and hyper.decoupled and hyper.bias_correction
        if not fits or len({buffer.numel for buffer in (*buffers, out or master)}) > 1:
            table[ADAM](master, grad, exp_avg, exp_avg_sq, out, hyper, grad_scale, rounding)
            return
        gradient = grad.raw.float()
        if grad_scale != 1:
            gradient.mul_(grad_scale)
        # It wants the powers of the betas from before this step, and multiplies them itself.
        powers = hyper.beta1 ** (hyper.step - 1), hyper.beta2 ** (hyper.step - 1)
        rest = (hyper.lr, hyper.weight_decay, hyper.beta1, hyper.beta2, hyper.eps, gradient)
        no_maximum, is_amsgrad, is_maximizing = None, False, False
        states = (master.raw, exp_avg.raw, exp_avg_sq.raw)
        torch_npu.npu_apply_adam_w(*powers, *rest, no_maximum, is_amsgrad, is_maximizing, out=states)
        for buffer in (master, exp_avg, exp_avg_sq):
            buffer.mark_written()
        if out is not None:
            table[CAST](master, out, rounding)

    return adam
