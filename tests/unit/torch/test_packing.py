"""Values beside a model's tensors come back from a checkpoint's bytes as they were, and nothing else does."""

from __future__ import annotations

import io
import math
from collections import Counter, OrderedDict
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from polyaccel.checkpoint.format.torch_values import packed, unpacked
from polyaccel.errors import CheckpointError

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from([torch.float16, torch.device("cpu"), 1 + 2j]),
)
keys = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.just("__packed__"))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


@given(values)
def test_plain_values_come_back(value: Any) -> None:
    again = unpacked(packed(value, "it"), "it")
    assert repr(again) == repr(value)
    assert type(again) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_tensors_come_back(dtype: torch.dtype) -> None:
    value = torch.arange(12).reshape(3, 4).t().to(dtype)
    again = unpacked(packed({"a": [value], 3: value[0, 0]}, "it"), "it")
    assert torch.equal(again["a"][0].float(), value.float())
    assert (again["a"][0].dtype, again[3].shape) == (dtype, ())


def test_what_libraries_keep_comes_back() -> None:
    state = {
        "milestones": Counter({30: 2}),
        "seen": {1, 2},
        "scores": np.arange(6.0).reshape(2, 3),
        "best": np.float64(0.5),
        "loss": math.inf,
        "shape": torch.Size([2, 3]),
    }
    again = unpacked(packed(state, "it"), "it")
    assert again.pop("scores").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert again == {**{key: state[key] for key in ("milestones", "seen", "loss")}, "best": 0.5, "shape": (2, 3)}
    assert type(again["milestones"]) is Counter


def test_the_bytes_are_a_safetensors_file(tmp_path: Any) -> None:
    (tmp_path / "state").write_bytes(packed({"momentum": torch.ones(3)}, "it"))
    with safe_open(tmp_path / "state", "np") as file:
        assert file.get_tensor("0").tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ({"a": [print]}, "builtins.builtin_function_or_method"),
        ({"a": object()}, "builtins.object"),
        ({"a": torch.eye(2).to_sparse()}, "it.a"),
        ({(1, print): 1}, "builtins.builtin_function_or_method"),
    ],
    ids=["function", "object", "sparse", "key"],
)
def test_what_cannot_be_read_back_safely_is_refused_by_its_place(value: Any, wrong: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        packed(value, "it")
    assert caught.value.value == wrong
    assert caught.value.hint


def test_what_torch_wrote_is_read_without_running_code() -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.ones(2)}, stream)
    assert unpacked(stream.getvalue(), "it")["a"].tolist() == [1, 1]
    stream = io.BytesIO()
    torch.save({"a": print}, stream)
    with pytest.raises(CheckpointError) as caught:
        unpacked(stream.getvalue(), "it")
    assert "`torch.serialization.safe_globals([print])`" in str(caught.value)


@given(st.binary(max_size=40))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError) as caught:
        unpacked(data, "it")
    assert str(caught.value).startswith("it ")


@given(st.integers(0, 400), st.integers(0, 7))
def test_flipped_bits_are_read_or_refused(at: int, bit: int) -> None:
    data = bytearray(packed({"a": torch.ones(2), 5: ("x", {1})}, "it"))
    data[at % len(data)] ^= 1 << bit
    with suppress(CheckpointError):
        unpacked(bytes(data), "it")
