"""Memory that torch cannot see: named where a module is to live there, and sent by gloo by way of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.torch_device import require_torch_memory
from polyaccel.comm.backends.torch.communicator import tensor_of
from polyaccel.core.types import DType
from polyaccel.errors import PluginContractError
from polyaccel.testkit.accelerator.memory import MemoryContract


class WithoutWrap(CpuAccelerator):
    def wrap(self, array: Any) -> Any:
        return super(CpuAccelerator, self).wrap(array)


class OfWithoutWrap(MemoryContract):
    def make(self) -> CpuAccelerator:
        return WithoutWrap("torch")


def test_a_device_of_torch_has_buffers_over_tensors() -> None:
    require_torch_memory(CpuAccelerator("torch"))
    with pytest.raises(PluginContractError) as raised:
        require_torch_memory(CpuAccelerator("numpy"))
    assert raised.value.value == "ndarray"
    assert all(part in str(raised.value) for part in ("`raw`", "numpy.ndarray"))
    assert "`torch_device_type = None`" in raised.value.hint


def test_a_device_of_torch_that_wraps_nothing_fails_its_check_and_says_what_is_missing() -> None:
    with pytest.raises(PluginContractError) as raised:
        OfWithoutWrap().test_arrays_are_wrapped_or_refused()
    assert raised.value.value == "torch.Tensor"
    assert "give it a `wrap`" in raised.value.hint


@pytest.mark.parametrize("numel", [0, 5])
@pytest.mark.parametrize("dtype", DType, ids=str)
def test_a_tensor_stands_on_numpy_s_memory(dtype: DType, numel: int) -> None:
    pytest.importorskip("ml_dtypes")
    buffer = CpuAccelerator("numpy").allocate(numel, dtype)
    tensor = tensor_of(buffer)
    assert str(tensor.dtype) == f"torch.{dtype.value}"
    tensor.fill_(1)
    ones = torch.ones(numel, dtype=tensor.dtype)
    assert buffer.to_bytes() == ones.view(torch.uint8).numpy().tobytes()
    assert np.shares_memory(buffer.raw, buffer.view(0, numel).raw) == bool(numel)
