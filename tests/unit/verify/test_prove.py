"""Which runs a verification needs: no more than it takes to show that nothing differs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.verify.compare import Tolerances
from polyaccel.verify.prove import prove
from polyaccel.verify.variant import NOISE, Record

PLAIN, MOVED = ["plain", "engine"], ["plain-1", "plain+1"]
NUMBERS = st.floats(-1e3, 1e3, width=32)


def runs_of(error: float, noise: float, *, ranks_differ: bool = False) -> tuple[list[str], bool, tuple[str, ...]]:
    """The runs of a program whose engine is off by `error` with a rewrite and whose moved runs by `noise`."""
    names = []

    def run(variant):
        names.append(variant.name)
        off = variant.moved * noise + (error if not (variant.is_plain or variant.without) else 0.0)
        records = [Record(rank) for rank in range(2)]
        for rank, record in enumerate(records):
            own = 0.5 * (ranks_differ and rank and not variant.is_plain)
            record.add(0, "gradient", "a", np.float32([1.0 + off + own, 2.0]))
            record.acted = {"cut": 1}
        return records

    proof = prove(run)
    return names, proof.is_proven, proof.blamed


@pytest.mark.parametrize(
    ("error", "noise", "runs"),
    [(0.0, 1e-3, PLAIN), (1e-6, 1e-3, PLAIN), (1e-4, 1e-3, [*PLAIN, "plain-1"]), (0.1, 0.0, [*PLAIN, *MOVED])],
)
def test_further_plain_runs_are_made_only_where_something_differs(error, noise, runs):
    names, is_proven, blamed = runs_of(error, noise)
    assert names[: len(runs)] == runs
    if error < 0.1:
        assert (names, is_proven, blamed) == (runs, True, ())
    else:
        assert names[len(runs) :] == ["plain, float64", "plain with noise 1", "without cut"]
        assert (is_proven, blamed) == (False, ("cut",))


@pytest.mark.parametrize(("fault", "is_proven"), [(0.0, True), (0.1, False)])
def test_a_choice_that_rounding_flips_is_no_difference_and_hides_none(fault, is_proven):
    """A router's two scores differ by less than the engine's rounding moves them."""

    def run(variant):
        rounding = 0.0 if variant.is_plain else -3e-7
        noise = NOISE * 1.2e-7 * np.random.default_rng(variant.noise).standard_normal() if variant.noise else 0.0
        expert = 1.0 if 1e-7 + rounding + noise > 0 else 5.0
        record = Record(0, acted={"cut": 1}, has_choices=True)
        off = 0.0 if variant.is_plain or variant.without else fault
        record.add(0, "gradient", "a", np.float32([expert + noise + off, 2.0]))
        return [record]

    proof = prove(run)
    assert proof.is_proven == is_proven


def test_ranks_that_differ_are_a_difference():
    names, is_proven, _ = runs_of(0.0, 0.0, ranks_differ=True)
    assert names == [*PLAIN, *MOVED]
    assert not is_proven


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=8))
def test_fewer_moved_runs_accept_nothing_that_more_would_not(rows):
    plain, below, above, engine = (
        {
            f"0/{kind}/{at}": np.float32([row[index]])
            for at, row in enumerate(rows)
            for kind in ("gradient", "attribute")
        }
        for index in range(4)
    )
    found = [
        {one.key for one in Tolerances.of_runs(plain, moved).findings(engine)}
        for moved in ([], [below], [below, above])
    ]
    assert found[0] >= found[1] >= found[2]
