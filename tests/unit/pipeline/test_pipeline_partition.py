"""Layers of a model over the chunks of a pipeline: no other split has a lighter heaviest part."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.pipeline.partition import layer_weights, split_layers
from polyaccel.pipeline.table import PipelineError


def heaviest(weights: list[float], parts: list[range]) -> float:
    return max(sum(weights[layer] for layer in part) for part in parts)


@settings(max_examples=80)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_no_split_is_better(weights: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    found = split_layers(weights, parts)
    assert [layer for part in found for layer in part] == list(range(len(weights)))
    assert len(found) == parts
    assert all(found)
    cuts = combinations(range(1, len(weights)), parts - 1)
    splits = ([range(a, b) for a, b in zip((0, *cut), (*cut, len(weights)), strict=True)] for cut in cuts)
    assert heaviest(weights, list(found)) == min(heaviest(weights, split) for split in splits)


@pytest.mark.parametrize(
    ("weights", "parts", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1, 1, 1], 2, [3, 2]),
        ([10, 1, 1, 1, 10], 3, [1, 3, 1]),
        ([0, 0, 0], 3, [1, 1, 1]),
        ([0, 5, 0, 5, 0], 2, [3, 2]),
        ([0, *[1] * 9, 0], 4, [4, 2, 2, 3]),
        ([3, 1, 1, 1, 1], 3, [1, 2, 2]),
        ([7], 1, [1]),
    ],
)
def test_parts_are_as_even_as_can_be(weights: list[float], parts: int, expected: list[int]) -> None:
    assert [len(part) for part in split_layers(weights, parts)] == expected


def test_fewer_layers_than_parts_are_refused() -> None:
    with pytest.raises(PipelineError) as caught:
        split_layers([1, 1], 3)
    assert caught.value.value == 2


NAMES, NUMELS = ["Embedding", "Block", "Block", "LayerNorm"], [100, 10, 10, 2]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("uniform", [1, 1, 1, 1]),
        ("parameters", [100, 10, 10, 2]),
        ("Parameters", [100, 10, 10, 2]),
        ("type:block", [0, 1, 1, 0]),
        ("type:Block|Norm", [0, 1, 1, 1]),
    ],
)
def test_a_method_weighs_layers(method: str, expected: list[float]) -> None:
    assert layer_weights(method, NAMES, NUMELS) == expected


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("profile", "'profile'"),
        ("type:", "'type:'"),
        ("type:Attention", "LayerNorm"),
        ("type:(", "'type:"),
    ],
)
def test_a_method_that_says_nothing_is_refused(method: str, named: str) -> None:
    with pytest.raises(PipelineError) as caught:
        layer_weights(method, NAMES, NUMELS)
    assert named in str(caught.value)
    assert caught.value.value == method
