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

from polyaccel.checkpoint.format.scalars import decode_plain, encode_plain
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
    ("value", "message"),
    [
        (np.float64(1.0), r"client_state\.best\[1\] is a numpy\.float64"),
        (np.zeros(3), r"client_state\.best\[1\] is a numpy\.ndarray"),
        ({1, 2}, r"client_state\.best\[1\] is a builtins\.set"),
        (Colour.RED, r"client_state\.best\[1\] is a .*Colour"),
        (OrderedDict(a=1), r"client_state\.best\[1\] is a collections\.OrderedDict"),
        ({"epochs": {3: 0.5}}, r"client_state\.best\[1\]\.epochs has the key 3 of type int"),
        (lambda: None, r"client_state\.best\[1\] is a builtins\.function"),
    ],
)
def test_anything_else_is_refused_with_its_dotted_key(value: object, message: str) -> None:
    with pytest.raises(SerializationError, match=message) as caught:
        tagged_json.to_bytes({"best": (0, value)}, "client_state")
    assert caught.value.hint


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SerializationError, match=f"deeper than {MAX_DEPTH} levels, or contains itself"):
        tagged_json.to_bytes({"loop": endless}, "client_state")


def test_the_deepest_value_allowed_comes_back() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = (value,)
    assert identical(round_trip(value), value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a":{"$set":[1]}}', r"marked '\$set', which this version does not support"),
        (b'{"$tuple":[1],"more":2}', r"marked '\$tuple', which this version does not support"),
        (b'{"$tuple":{"a":1}}', r"marked '\$tuple' that cannot be understood: it holds a dict, not a list"),
        (b'{"$float":"1e3"}', r"'1e3' is not one of nan, inf, -inf"),
        (b'{"$float":NaN}', "nan is not one of"),
        (b'{"$bytes":"A"}', r"marked '\$bytes' that cannot be understood"),
        (b'{"$bytes":7}', r"marked '\$bytes' that cannot be understood"),
        (b'{"$int":[]}', r"marked '\$int' that cannot be understood"),
        (b'{"$dict":[["a",1,2]]}', "not pairs of a text and a value"),
        (b'{"$dict":[[[],1]]}', "not pairs of a text and a value"),
        (b"1e999", "a value inf where only finite numbers stand"),
        (b"[" * 400 + b"]" * 400, f"deeper than {MAX_DEPTH} levels"),
        (b"[" * 100_000, "that are not a plain value"),
        (b"9" * 10_000, "that are not a plain value"),
        (b"", "that are not a plain value"),
        (b"\x80\x04K\x01.", "that are not a plain value"),
    ],
)
def test_bytes_that_nobody_wrote_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(SerializationError, match=message):
        tagged_json.from_bytes(data)


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
    with pytest.raises(CheckpointError, match=r"a checkpoint cannot hold this: scalars\.seen is a builtins\.set"):
        encode_plain({"seen": {1}}, "scalars")
    with pytest.raises(
        CheckpointError, match=r"the manifest holds a value marked '\$set', which this version does not support"
    ):
        decode_plain({"a": {"$set": [1]}})
