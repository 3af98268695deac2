"""Combinations of settings: of every two factors every pair of values, or the whole product where that is asked for.

Faults of numbers come from one setting or from two that meet; three that must meet are rare. `make test` runs the
pairs, `make test-parity` (TESTS_PARITY=full) the product.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations as pairs_of
from itertools import product
from typing import Any

import pytest

FULL = "full"
VARIABLE = "TESTS_PARITY"


def all_pairs(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each factor, such that every two values of different factors stand together in a row.

    The same rows every time: of the rows of the product the first one that has most pairs that are still missing, until
    none is.
    """
    rows = list(product(*(range(len(values)) for values in factors)))
    missing = {pair for row in rows for pair in _pairs(row)} if len(factors) > 1 else set()
    if not missing:
        return list(product(*factors))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        chosen.append(best)
    return [tuple(values[at] for values, at in zip(factors, row, strict=True)) for row in chosen]


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    """Every two (factor, value) of a row."""
    return set(pairs_of(enumerate(row), 2))


def chosen(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The rows to run: all pairs, or the product where TESTS_PARITY says "full"."""
    return list(product(*factors)) if os.environ.get(VARIABLE) == FULL else all_pairs(*factors)


def combinations(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """A test's parameters by name, in the rows of `chosen`. A value may be a `pytest.param`, whose marks and id hold
    for every row that it stands in."""
    rows = []
    for row in chosen(*factors.values()):
        params = [value if hasattr(value, "marks") else pytest.param(value) for value in row]
        name = "-".join(param.id or _name(param.values[0]) for param in params)
        marks = [mark for param in params for mark in param.marks]
        rows.append(pytest.param(*(param.values[0] for param in params), marks=marks, id=name))
    return pytest.mark.parametrize(tuple(factors), rows)


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", value))
