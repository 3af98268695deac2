"""The batch triad agrees with the world size, or the message has every number one needs to see why not."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.config.resolve import Triad, solve_triad
from polyaccel.errors import Problem

sizes = st.integers(1, 64)
unknown = st.none() | sizes


@given(unknown, unknown, unknown, sizes)
def test_a_solution_keeps_what_is_given_and_is_consistent(
    train: int | None, micro: int | None, gas: int | None, world: int
) -> None:
    solved = solve_triad(train, micro, gas, world_size=world)
    if isinstance(solved, Problem):
        numbers = [str(number) for number in (train, micro, gas, world) if number is not None]
        assert all(number in solved.expected for number in numbers)
        assert solved.key == "train_batch_size"
        assert solved.hint
    else:
        assert solved.train == solved.micro * solved.gas * world
        assert train in (None, solved.train)
        assert micro in (None, solved.micro)
        assert gas in (None, solved.gas)
        assert min(solved.train, solved.micro, solved.gas) >= 1


@given(sizes, sizes, sizes)
def test_any_two_of_a_consistent_triad_give_the_third(micro: int, gas: int, world: int) -> None:
    whole = (micro * gas * world, micro, gas)
    for kept in combinations(range(3), 2):
        given_values = [value if index in kept else None for index, value in enumerate(whole)]
        assert solve_triad(*given_values, world_size=world) == Triad(*whole)
    assert solve_triad(*whole, world_size=world) == Triad(*whole)


@given(sizes, sizes)
def test_one_size_alone_means_one_micro_batch(micro: int, world: int) -> None:
    expected = Triad(micro * world, micro, 1)
    assert solve_triad(None, micro, None, world_size=world) == expected
    assert solve_triad(micro * world, None, None, world_size=world) == expected


@pytest.mark.parametrize("gas", [None, 2])
def test_without_a_batch_size_there_is_no_solution(gas: int | None) -> None:
    assert isinstance(solve_triad(None, None, gas, world_size=2), Problem)


@given(st.integers(1, 200), st.integers(2, 9))
def test_the_suggested_batch_size_does_solve_it(train: int, world: int) -> None:
    solved = solve_triad(train, None, None, world_size=world)
    if isinstance(solved, Problem):
        suggested = int(solved.hint.removeprefix("use ").removesuffix(", for example"))
        assert isinstance(solve_triad(suggested, None, None, world_size=world), Triad)
    else:
        assert train % world == 0
