"""The rows that `make test` runs of a parity test: every pair of values of any two factors, the same every time."""

from __future__ import annotations

from itertools import combinations as pairs_of
from itertools import product

import pairwise
import pytest

TABLES = [
    [("a", "b")],
    [(0, 1, 2), (0, 1)],
    [(1, 2, 3), (1, 3), (0.0, 0.5), ("fp32", "bf16")],
    [("host", "half", "nvme", "pipelined"), (0, 1, 2, 3), (1, 2, 3), (True, False)],
    [range(5), range(5), range(5), range(5), range(5)],
]


@pytest.mark.parametrize("factors", TABLES, ids=lambda factors: "x".join(str(len(values)) for values in factors))
def test_every_pair_of_values_stands_in_a_row(factors):
    rows = pairwise.all_pairs(*factors)
    for one, other in pairs_of(range(len(factors)), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(factors[one], factors[other]))
    assert {row[0] for row in rows} == set(factors[0])
    assert all(value in values for row in rows for value, values in zip(row, factors, strict=True))
    assert rows == pairwise.all_pairs(*factors)


def test_it_is_less_than_the_product():
    assert len(pairwise.all_pairs((1, 2, 3), (1, 3), (0.0, 0.5), ("fp32", "bf16"))) <= 8 < 24
    assert len(pairwise.all_pairs(*[range(4)] * 5)) <= 32 < 4**5


def test_the_product_is_run_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv(pairwise.VARIABLE, pairwise.FULL)
    assert len(pairwise.chosen((1, 2), (1, 2), (1, 2))) == 8
    monkeypatch.delenv(pairwise.VARIABLE)
    assert len(pairwise.chosen((1, 2), (1, 2), (1, 2))) == 4


def test_marks_and_names_of_values_are_those_of_the_rows_with_them():
    mark = pytest.mark.skip(reason="not here")
    decorator = pairwise.combinations(backend=["gloo", pytest.param("mpi", marks=mark)], world=(2, 3))
    names, rows = decorator.args
    assert names == ("backend", "world")
    assert {row.id: [one.name for one in row.marks] for row in rows} == {
        "gloo-2": [],
        "gloo-3": [],
        "mpi-2": ["skip"],
        "mpi-3": ["skip"],
    }
