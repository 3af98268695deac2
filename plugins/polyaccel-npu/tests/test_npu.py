"""The plugin on a stand-in of torch_npu that obeys its documented signature. None of this is a run on hardware."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from polyaccel_npu.accelerator import AscendAccelerator

from polyaccel.accelerators import device_probe, npu
from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.ops.base import UPDATE
from polyaccel.testkit.accelerator import KernelsContract

CALLS: list[float] = []


def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: torch.Tensor,
    max_grad_norm: torch.Tensor | None,
    amsgrad: bool,
    maximize: bool,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """What the operator computes by op-plugin's own test."""
    assert (max_grad_norm, amsgrad, maximize) == (None, False, False)
    var, m, v = out
    CALLS.append(lr)
    m.mul_(beta1).add_(grad * (1 - beta1))
    v.mul_(beta2).add_((grad * grad) * (1 - beta2))
    denominator = (v / (1 - beta2_power * beta2)).sqrt() + epsilon
    var.mul_(1 - lr * weight_decay).sub_((m * (lr / (1 - beta1_power * beta1))) / denominator)


class OnHost(AscendAccelerator):
    """The plugin's kernels over host memory."""

    torch_device_type = "cpu"
    extension = None

    def __init__(self) -> None:
        self._host = CpuAccelerator("torch", native=False)

    def allocate(self, *args: Any, **options: Any) -> Any:
        return self._host.allocate(*args, **options)


@pytest.fixture(autouse=True)
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch_npu")
    module.npu_apply_adam_w = npu_apply_adam_w  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)


class TestKernels(KernelsContract):
    def make(self) -> Accelerator:
        return OnHost()


def test_the_fused_step_is_in_the_table_and_used() -> None:
    CALLS.clear()
    TestKernels().test_kernels_mean_what_the_reference_says()
    assert CALLS
    assert OnHost().kernels().provider(UPDATE) == "torch_npu"


def test_it_is_chosen_before_the_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_probe, "loaded_torch", lambda: None)
    monkeypatch.setattr(device_probe, "glob", lambda pattern: ["/dev/davinci0"])
    monkeypatch.setattr(npu, "find_spec", lambda name: object())
    ours, theirs = AscendAccelerator.probe(), npu.NpuAccelerator.probe()
    assert ours.usable
    assert ours.priority == theirs.priority + 1
    assert AscendAccelerator().device_name(1) == "npu:1"
