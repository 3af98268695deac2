"""Element types, devices and parameter specifications."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.core.types import DeviceId, DType, ParamSpec
from polyaccel.errors import ShardingError


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.BFLOAT16])
def test_sizes_and_names_are_those_of_numpy(dtype: DType) -> None:
    assert np.dtype(dtype.value).itemsize == dtype.itemsize
    assert (np.dtype(dtype.value).kind == "f") == dtype.is_floating


def test_bfloat16_is_a_float_of_two_bytes() -> None:
    assert (DType.BFLOAT16.itemsize, DType.BFLOAT16.is_floating) == (2, True)


@pytest.mark.parametrize("dtype", list(DType))
def test_a_type_is_found_by_its_own_name(dtype: DType) -> None:
    assert DType.parse(dtype.value) is dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp64", DType.FLOAT64),
        ("double", DType.FLOAT64),
        ("fp32", DType.FLOAT32),
        ("float", DType.FLOAT32),
        ("fp16", DType.FLOAT16),
        ("half", DType.FLOAT16),
        ("bf16", DType.BFLOAT16),
    ],
)
def test_a_type_is_found_by_its_short_name(name: str, dtype: DType) -> None:
    assert DType.parse(name) is dtype


@pytest.mark.parametrize("name", ["float8", "FP32", "", "torch.float32"])
def test_an_unknown_name_is_refused_with_those_known(name: str) -> None:
    with pytest.raises(ShardingError) as caught:
        DType.parse(name)
    assert str(name) in str(caught.value)
    assert caught.value.value == name
    assert "bfloat16" in caught.value.hint
    assert "bf16" in caught.value.hint


def test_a_device_is_written_as_users_write_it() -> None:
    assert [str(DeviceId("cpu")), str(DeviceId("cuda", 0)), str(DeviceId("xpu", 3))] == ["cpu", "cuda:0", "xpu:3"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=4).map(tuple), st.sampled_from(DType))
def test_a_parameter_counts_its_elements_and_bytes(shape: tuple[int, ...], dtype: DType) -> None:
    param = ParamSpec("p", shape, dtype)
    numel = 1
    for size in shape:
        numel *= size
    assert (param.numel, param.nbytes) == (numel, numel * dtype.itemsize)
