"""Plain values come back exactly, and everything else is refused with its dotted key."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.checkpoint.format.manifest import decode_plain, encode_plain
from polyaccel.core import tagged_json
from polyaccel.core.tagged_json import MAX_DEPTH, SerializationError
from polyaccel.errors import CheckpointError

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
keys = st.text() | st.sampled_from(["$tuple", "$dict", "$", "$bytes"])
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


def round_trip(value: Any) -> Any:
    return tagged_json.from_bytes(tagged_json.to_bytes(value, "client_state"))


def identical(left: Any, right: Any) -> bool:
    """Equal, of equal types all the way down, dicts in the same order; NaN equals NaN and 0.0 differs from -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(identical(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(identical, left, right))
    if isinstance(left, float):
        return repr(left) == repr(right)
    return bool(left == right)


@given(values)
def test_a_plain_value_comes_back_exactly(value: Any) -> None:
    assert identical(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [2**64, -(2**64), pytest.param(10**5000, id="huge"), -0.0, math.inf, -math.inf, 5e-324, "\ud800", (), b"\0\xff"],
)
def test_an_extreme_value_comes_back_exactly(value: Any) -> None:
    assert identical(round_trip(value), value)


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        (np.float64(1.0), "numpy.float64"),
        (np.zeros(3), "numpy.ndarray"),
        ({1, 2}, "builtins.set"),
        (Colour.RED, "test_plain.Colour"),
        (OrderedDict(a=1), "collections.OrderedDict"),
        ({"epochs": {3: 0.5}}, 3),
        (lambda: None, "builtins.function"),
    ],
)
def test_anything_else_is_refused_with_its_dotted_key(value: object, wrong: object) -> None:
    with pytest.raises(SerializationError) as caught:
        tagged_json.to_bytes({"best": (0, value)}, "client_state")
    assert caught.value.value == wrong
    assert caught.value.hint


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SerializationError) as caught:
        tagged_json.to_bytes({"loop": endless}, "client_state")
    assert str(MAX_DEPTH) in str(caught.value)


def test_the_deepest_value_allowed_comes_back() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = (value,)
    assert identical(round_trip(value), value)


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (b'{"a":{"$set":[1]}}', "$set"),
        (b'{"$tuple":[1],"more":2}', "$tuple"),
        (b'{"$tuple":{"a":1}}', "$tuple"),
        (b'{"$float":"1e3"}', "$float"),
        (b'{"$float":NaN}', "$float"),
        (b'{"$bytes":"A"}', "$bytes"),
        (b'{"$bytes":7}', "$bytes"),
        (b'{"$int":[]}', "$int"),
        (b'{"$dict":[["a",1,2]]}', "$dict"),
        (b'{"$dict":[[[],1]]}', "$dict"),
        (b"1e999", math.inf),
        (b"[" * 400 + b"]" * 400, None),
        (b"[" * 100_000, b"[" * 32),
        (b"9" * 10_000, b"9" * 32),
        (b"", b""),
        (b"\x80\x04K\x01.", b"\x80\x04K\x01."),
    ],
)
def test_bytes_that_nobody_wrote_are_refused(data: bytes, wrong: object) -> None:
    with pytest.raises(SerializationError) as caught:
        tagged_json.from_bytes(data)
    assert caught.value.value == wrong


@given(
    st.binary()
    | st.text().map(str.encode)
    | st.recursive(
        leaves.filter(lambda leaf: not isinstance(leaf, bytes)),
        lambda inner: st.lists(inner) | st.dictionaries(keys, inner),
    )
    .map(json.dumps)
    .map(str.encode)
)
def test_any_bytes_give_a_plain_value_or_a_plain_error(data: bytes) -> None:
    try:
        value = tagged_json.from_bytes(data)
    except SerializationError:
        return
    assert identical(round_trip(value), value)


def test_a_checkpoint_says_what_it_cannot_hold() -> None:
    with pytest.raises(CheckpointError) as caught:
        encode_plain({"seen": {1}}, "scalars")
    assert caught.value.value == "builtins.set"
    assert "scalars.seen" in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        decode_plain({"a": {"$set": [1]}})
    assert caught.value.value == "$set"
