"""The accelerator plugin: polyaccel's own for Ascend NPUs with torch_npu's fused step. Not run on hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar

from polyaccel.accelerators.base import Probe
from polyaccel.accelerators.npu import NpuAccelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.ops.base import CAST, UPDATE, KernelTable, Rule, StochasticRounding, UpdateFn
from polyaccel.ops.optimizers import ADAMW


class AscendAccelerator(NpuAccelerator):
    """`torch.npu` with HCCL and the fused AdamW step. Not run on hardware."""

    API_VERSION: ClassVar[tuple[int, int]] = (3, 0)
    name: ClassVar[str] = "ascend"

    @classmethod
    def probe(cls) -> Probe:
        found = super().probe()
        return replace(found, priority=found.priority + 1)

    def kernels(self) -> KernelTable:
        table = super().kernels()
        return table.replaced("torch_npu", {UPDATE: fused_adamw(import_module("torch_npu"), table)})


def fused_adamw(torch_npu: Any, table: KernelTable) -> UpdateFn:
    """The op `update`, AdamW by `torch_npu.npu_apply_adam_w`; what that does not cover is left to `table`."""

    def update(
        rule: Rule,
        master: Buffer,
        grad: Buffer,
        states: Sequence[Buffer],
        out: Buffer | None = None,
        grad_scale: float = 1.0,
        rounding: StochasticRounding | None = None,
    ) -> None:
        if rule.formula is not ADAMW or not rule.settings["bias_correction"]:
            table[UPDATE](rule, master, grad, states, out, grad_scale, rounding)
            return
        if master.dtype in (DType.BFLOAT16, DType.FLOAT16):
            from polyaccel.accelerators.memory.torch import wrap_torch

            wide = wrap_torch(master.raw.float())
            update(rule, wide, grad, states, out, grad_scale, rounding)
            table[CAST](wide, master, rounding)
            return
        rule.check(master, grad, states, out)
        if any(b.dtype is not DType.FLOAT32 for b in (master, *states)) or grad.dtype is DType.FLOAT64:
            table[UPDATE](rule, master, grad, states, out, grad_scale, rounding)
            return
        gradient = grad.raw.float()
        if grad_scale != 1:
            gradient.mul_(grad_scale)
        s = rule.settings
        # It wants the powers of the betas from before this step, and multiplies them itself.
        powers = s["beta1"] ** (rule.step - 1), s["beta2"] ** (rule.step - 1)
        rest = (s["lr"], s["weight_decay"], s["beta1"], s["beta2"], s["eps"], gradient)
        no_maximum, is_amsgrad, is_maximizing = None, False, False
        written = tuple(buffer.raw for buffer in (master, *states))
        torch_npu.npu_apply_adam_w(*powers, *rest, no_maximum, is_amsgrad, is_maximizing, out=written)
        rule.bump_version(master, states, None)
        if out is not None:
            table[CAST](master, out, rounding)

    return update
