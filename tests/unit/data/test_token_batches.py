"""Groups of samples by tokens, compared with a definition that tries every end."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from polyaccel.data.token_batches import LR_SCALES, group_by_tokens
from polyaccel.errors import PolyaccelError

LENGTHS = np.random.default_rng(0).integers(1, 40, 83)


def by_definition(numbers: list[int], most_tokens: int, least: int, most: int) -> list[list[int]]:
    """Of all valid runs that begin at the next sample the longest; a sample that begins none is left out."""
    numbers = [one for one in numbers if LENGTHS[one] <= most_tokens]
    found = []
    while numbers:
        runs = [numbers[:count] for count in range(least, min(most, len(numbers)) + 1)]
        valid = [run for run in runs if sum(LENGTHS[one] for one in run) <= most_tokens]
        if valid:
            found.append(valid[-1])
        numbers = numbers[len(valid[-1]) if valid else 1 :]
    return found


@pytest.mark.parametrize(("max_tokens", "least", "most"), [(64, 1, None), (64, 1, 3), (64, 4, 6), (30, 1, None)])
@pytest.mark.parametrize("order", ["dataloader", "random", "seqlen"])
def test_groups_are_those_of_the_definition(order: str, max_tokens: int, least: int, most: int | None) -> None:
    numbers = list(range(len(LENGTHS)))
    if order == "random":
        random.Random(7).shuffle(numbers)
    elif order == "seqlen":
        numbers.sort(key=lambda one: (LENGTHS[one], one))
    wanted = by_definition(numbers, max_tokens, least, most or len(LENGTHS))
    options: dict[str, Any] = {"max_tokens": max_tokens, "least": least, "most": most, "order": order, "seed": 7}
    found = group_by_tokens(LENGTHS, **options)
    assert [found[at].tolist() for at in range(len(found))] == wanted
    batched = group_by_tokens(LENGTHS, per_batch=4, **options)
    whole = len(wanted) // 4 * 4
    assert [batched[at].tolist() for at in range(len(batched))] == wanted[:whole]
    sizes = [sum(len(one) for one in wanted[at : at + 4]) for at in range(0, whole, 4)]
    assert batched.batch_sizes().tolist() == sizes
    assert sorted([*batched.samples, *batched.left_out]) == list(range(len(LENGTHS)))


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([[1, 2]], {"max_tokens": 4}),
        ([1.5], {"max_tokens": 4}),
        ([-1], {"max_tokens": 4}),
        ([5, 6], {"max_tokens": 4}),
        ([1, 1], {"max_tokens": 4, "per_batch": 2}),
        ([], {"max_tokens": 4}),
    ],
)
def test_lengths_that_make_no_batch_are_refused(lengths: Any, options: dict[str, Any]) -> None:
    with pytest.raises(PolyaccelError):
        group_by_tokens(lengths, **options)


def test_learning_rates_follow_the_samples() -> None:
    assert [LR_SCALES[method](4.0) for method in ("linear", "sqrt", "none")] == [4.0, 2.0, 1.0]
