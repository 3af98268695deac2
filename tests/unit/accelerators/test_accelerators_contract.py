"""The CPU accelerator keeps the contract of every accelerator, on torch and on numpy memory."""

from __future__ import annotations

import subprocess
import sys
from unittest import SkipTest

import numpy as np
import pytest
import torch

from polyaccel.accelerators.base import Accelerator, NullEvent, describe
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.types import DType
from polyaccel.errors import PluginContractError, ShardingError
from polyaccel.testkit.accelerator import AcceleratorContract


class TestCpuOnTorch(AcceleratorContract):
    def make(self) -> Accelerator:
        return CpuAccelerator("torch")


class TestCpuOnNumpy(AcceleratorContract):
    def make(self) -> Accelerator:
        return CpuAccelerator("numpy")

    def test_torch_knows_enough_of_the_device(self) -> None:
        raise SkipTest("for hosts without torch, which sees none of its memory")


class TestCpuOnTorchWithoutNative(AcceleratorContract):
    def make(self) -> Accelerator:
        return CpuAccelerator("torch", native=False)


class TestCpuOnNumpyWithoutNative(TestCpuOnNumpy):
    def make(self) -> Accelerator:
        return CpuAccelerator("numpy", native=False)


def test_memory_defaults_to_torch_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CpuAccelerator().memory == "torch"
    monkeypatch.setattr("polyaccel.accelerators.cpu.find_spec", lambda name: None)
    without = CpuAccelerator()
    assert without.memory == "numpy"
    assert without.communication_backend_name() == "local"
    assert not without.is_bf16_supported()


def test_an_unknown_memory_is_refused() -> None:
    with pytest.raises(PluginContractError) as caught:
        CpuAccelerator("cupy")  # type: ignore[arg-type]
    assert caught.value.value == "cupy"


def test_numpy_memory_never_loads_torch() -> None:
    program = """
import sys
from unittest import SkipTest
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.ops.base import UPDATE
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.core.types import DType
cpu = CpuAccelerator("numpy")
buffers = [cpu.allocate(40, DType.FLOAT32) for _ in range(4)]
rule = OPTIMIZERS["Adam"].rule({"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}, 1)
cpu.kernels()[UPDATE](rule, *buffers[:2], buffers[2:])
cpu.manual_seed(3), cpu.set_rng_state(cpu.rng_state()), cpu.memory_stats()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(
    ("memory", "draw"), [("torch", lambda: torch.rand(4).tolist()), ("numpy", lambda: np.random.rand(4).tolist())]
)
def test_a_restored_generator_draws_the_same_numbers(memory: str, draw: object) -> None:
    assert callable(draw)
    cpu = CpuAccelerator(memory)  # type: ignore[arg-type]
    state = cpu.rng_state()
    drawn = draw()
    assert draw() != drawn
    cpu.set_rng_state(state)
    assert draw() == drawn


def test_the_state_of_another_memory_is_refused() -> None:
    of_torch, of_numpy = CpuAccelerator("torch").rng_state(), CpuAccelerator("numpy").rng_state()
    with pytest.raises(ShardingError) as caught:
        CpuAccelerator("numpy").set_rng_state(of_torch)
    assert caught.value.value == len(of_torch)
    with pytest.raises(ShardingError) as caught:
        CpuAccelerator("torch").set_rng_state(of_numpy)
    assert caught.value.value == len(of_numpy)


def test_the_peak_of_memory_outlives_what_made_it_and_can_be_reset() -> None:
    cpu = CpuAccelerator()
    cpu.reset_peak_memory()
    held = cpu.allocate(128 << 20, DType.UINT8)
    held.fill(1)
    peak = cpu.max_memory_allocated()
    del held
    assert cpu.max_memory_allocated() > peak - (16 << 20)  # the kernel counts pages by the batch
    cpu.reset_peak_memory()
    assert cpu.max_memory_allocated() < peak - (64 << 20)


def test_the_names_that_deepspeed_users_call_answer() -> None:
    cpu = CpuAccelerator()
    assert (cpu.device_name(), cpu.device_name(1), cpu.is_available()) == ("cpu", "cpu:1", True)
    assert cpu.is_bf16_supported()
    assert cpu.is_fp16_supported()
    assert cpu.communication_backend_name() == "gloo"
    assert cpu.total_memory() >= cpu.available_memory() > 0
    assert cpu.memory_allocated() > 0
    assert describe(cpu.capabilities())["default comm"] == "gloo"


def test_events_of_different_devices_are_not_compared() -> None:
    stranger = object()
    with pytest.raises(PluginContractError) as caught:
        NullEvent().elapsed_ms(stranger)  # type: ignore[arg-type]
    assert caught.value.value is stranger
