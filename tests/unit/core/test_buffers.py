"""Buffers over torch and numpy memory: wrapping, exchange between the two, refusals, staggered starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.host import aligned_shift, spare_nbytes
from polyaccel.accelerators.memory.numpy import NumpyBuffer, numpy_dtype
from polyaccel.accelerators.memory.torch import TorchBuffer, dtype_of, torch_dtype
from polyaccel.core.types import DeviceId, DType
from polyaccel.errors import PluginContractError, ShardingError

TORCH, NUMPY = CpuAccelerator("torch"), CpuAccelerator("numpy")


def test_a_wrapped_tensor_is_the_tensor() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    buffer = TORCH.wrap(weight)
    assert (buffer.numel, buffer.dtype, buffer.device) == (12, DType.FLOAT32, DeviceId("cpu"))
    assert buffer.data_ptr() == weight.data_ptr()
    buffer.view(4, 4).fill(2.0)
    assert weight[1].tolist() == [2.0] * 4
    assert not buffer.raw.requires_grad


def test_scalars_and_empty_tensors_are_flat_buffers() -> None:
    assert TORCH.wrap(torch.tensor(3.5)).to_bytes() == np.float32(3.5).tobytes()
    assert len(TORCH.wrap(torch.zeros(0, 4))) == 0
    assert NUMPY.wrap(np.array(3.5)).numel == 1


def test_what_is_not_contiguous_is_refused_with_the_cure() -> None:
    with pytest.raises(ShardingError) as caught:
        TORCH.wrap(torch.zeros(3, 4).T)
    assert caught.value.value == (1, 4)
    assert "tensor.contiguous()" in str(caught.value)
    with pytest.raises(ShardingError) as caught:
        NUMPY.wrap(np.zeros((3, 4)).T)
    assert caught.value.value == (8, 32)
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(ShardingError) as caught:
        NUMPY.wrap(frozen)
    assert caught.value.value == (8,)
    square = torch.zeros(2, 2)
    with pytest.raises(ShardingError) as caught:
        TorchBuffer(square)
    assert caught.value.value is square
    with pytest.raises(ShardingError) as caught:
        NumpyBuffer(np.zeros(8)[::2])
    assert caught.value.value == (4,)


def test_each_memory_knows_its_own_arrays_only() -> None:
    with pytest.raises(PluginContractError) as caught:
        TORCH.wrap(np.zeros(3))
    assert caught.value.value == "numpy.ndarray"
    with pytest.raises(PluginContractError) as caught:
        NUMPY.wrap(torch.zeros(3))
    assert caught.value.value == "torch.Tensor"


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.BFLOAT16])
def test_torch_and_numpy_exchange_every_type(dtype: DType) -> None:
    source, target = NUMPY.allocate(5, dtype), TORCH.allocate(5, dtype)
    source.fill(1)
    target.copy_from(source)
    assert target.raw.tolist() == [1] * 5
    target.fill(0)
    source.copy_from(target)
    assert source.raw.tolist() == [0] * 5


def test_numpy_reads_bfloat16_of_torch_exactly() -> None:
    source = TORCH.wrap(torch.tensor([1.0078125, -3.0, float("inf"), 1e-38], dtype=torch.bfloat16))
    target = NUMPY.allocate(4, DType.FLOAT32)
    target.copy_from(source)
    assert target.raw.tolist() == source.raw.tolist()


def test_bfloat16_in_numpy_is_refused_with_the_cure_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)  # as if it were not installed
    with pytest.raises(ShardingError) as caught:
        NUMPY.allocate(4, DType.BFLOAT16)
    assert caught.value.value == "bfloat16"
    assert "ml_dtypes" in str(caught.value)


def test_types_map_both_ways_and_unknown_ones_are_refused() -> None:
    for dtype in DType:
        assert dtype_of(torch_dtype(dtype)) is dtype
        if dtype is not DType.BFLOAT16:
            assert DType.parse(numpy_dtype(dtype).name) is dtype
    with pytest.raises(ShardingError) as caught:
        TORCH.wrap(torch.zeros(2, dtype=torch.complex64))
    assert "complex64" in str(caught.value)


@pytest.mark.parametrize("accelerator", [TORCH, NUMPY], ids=["torch", "numpy"])
def test_a_buffer_is_exported_by_dlpack_without_a_copy(accelerator: CpuAccelerator) -> None:
    buffer = accelerator.allocate(8, DType.FLOAT32)
    seen = torch.from_dlpack(buffer)
    buffer.fill(4.0)
    assert seen.tolist() == [4.0] * 8
    assert seen.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("accelerator", [TORCH, NUMPY], ids=["torch", "numpy"])
def test_large_buffers_start_at_different_places_of_a_window(accelerator: CpuAccelerator) -> None:
    held = [accelerator.allocate(1 << 20, DType.FLOAT32) for _ in range(4)]
    assert len({buffer.data_ptr() % (1 << 16) for buffer in held}) == 4


def test_an_allocation_has_room_for_its_shift() -> None:
    for nbytes in (0, 1, 100, (1 << 20) - 1, 1 << 20, 1 << 24):
        for address in (0, 16, 48, 64, 4096 + 16, (1 << 16) - 64, (1 << 40) + 32):
            shift = aligned_shift(address, nbytes)
            assert 0 <= shift <= spare_nbytes(nbytes)
            assert (address + shift) % 64 == 0
