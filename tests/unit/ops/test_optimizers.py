"""The optimizers that torch has too: several updates by each implementation of a formula end where torch's own end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import ShardingError
from polyaccel.ops.base import UPDATE, KernelTable
from polyaccel.ops.native import native
from polyaccel.ops.optimizers import OPTIMIZERS

NUMEL = 101
Groups = Mapping[str, Any]
OPTIM: Any = torch.optim
CASES: dict[str, tuple[str, Groups, Callable[[list[torch.Tensor]], torch.optim.Optimizer]]] = {
    "AdamW": (
        "AdamW",
        {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.1},
        lambda p: OPTIM.AdamW(p, lr=0.01, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1),
    ),
    "Adam with L2": (
        "Adam",
        {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.1, "decoupled": False},
        lambda p: OPTIM.Adam(p, lr=0.01, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1),
    ),
    "Adamax": (
        "Adamax",
        {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.1},
        lambda p: OPTIM.Adamax(p, lr=0.01, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1),
    ),
    "SGD": (
        "SGD",
        {"lr": 0.1, "weight_decay": 0.01},
        lambda p: OPTIM.SGD(p, lr=0.1, weight_decay=0.01),
    ),
    "SGD with momentum": (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
        lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    ),
    "SGD, Nesterov": (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    ),
    "Adagrad": (
        "Adagrad",
        {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.01},
        lambda p: OPTIM.Adagrad(p, lr=0.1, lr_decay=0.2, weight_decay=0.01),
    ),
}


def jax_accelerator() -> Accelerator:
    pytest.importorskip("jax")
    from polyaccel.accelerators.jax_generic import device_plugin

    plugin = device_plugin("cpu")
    assert plugin is not None
    return plugin()


def native_accelerator() -> Accelerator:
    if native().library is None:
        pytest.skip(native().reason)
    return CpuAccelerator("torch")


def triton_accelerator() -> Accelerator:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("set TRITON_INTERPRET=1 before Triton is imported: make test-triton")
    from polyaccel.ops.triton.torch_table import triton_kernels

    class Interpreted(CpuAccelerator):
        def kernels(self) -> KernelTable:
            return triton_kernels(super().kernels(), "cpu")

    return Interpreted("torch", native=False)


IMPLEMENTATIONS: dict[str, Callable[[], Accelerator]] = {
    "numpy": lambda: CpuAccelerator("numpy", native=False),
    "torch": lambda: CpuAccelerator("torch", native=False),
    "csrc": native_accelerator,
    "jax": jax_accelerator,
    "triton": triton_accelerator,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_updates_follow_torchs_own(implementation: str, case: str) -> None:
    accelerator = IMPLEMENTATIONS[implementation]()
    name, group, make = CASES[case]
    row = OPTIMIZERS[name]

    def filled(tensor: torch.Tensor) -> Buffer:
        buffer = accelerator.allocate(NUMEL, DType.FLOAT32)
        buffer.from_bytes(tensor.detach().numpy().tobytes())
        return buffer

    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(NUMEL, generator=generator))
    theirs, master = make([weight]), filled(weight)
    states = {state: filled(torch.zeros(NUMEL)) for state in row.states}
    for step in range(1, 6):
        weight.grad = torch.randn(NUMEL, generator=generator)
        rule = row.rule(group, step)
        given = [states[state] for state, _ in rule.formula.states]
        accelerator.kernels()[UPDATE](rule, master, filled(weight.grad), given)
        theirs.step()
    found = np.frombuffer(master.to_bytes(), np.float32)
    np.testing.assert_allclose(found, weight.detach().numpy(), rtol=2e-6, atol=2e-7)


def test_a_formula_gets_all_its_states() -> None:
    accelerator = CpuAccelerator("numpy")
    master, grad, state = (accelerator.allocate(8, DType.FLOAT32) for _ in range(3))
    rule = OPTIMIZERS["AdamW"].rule({"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}, 1)
    with pytest.raises(ShardingError) as caught:
        accelerator.kernels()[UPDATE](rule, master, grad, [state])
    assert caught.value.value == 1
    assert "exp_avg_sq" in str(caught.value)
