"""The choice of what is recomputed: the best that there is, within the limit, never dearer for a higher limit."""

from __future__ import annotations

import random
from itertools import product

import pytest

from polyaccel.errors import ConfigError
from polyaccel.planner.recomputation import CallCosts, Level, PassCosts, choose_levels, describe


def drawn(seed: int, calls: int) -> PassCosts:
    """Calls of random sizes, small enough that the choice need not round them."""
    draw = random.Random(seed)
    found = []
    for index in range(calls):
        nbytes, results = draw.randint(5, 60), draw.randint(1, 20)
        cost = draw.randint(10, 100)
        found.append(
            CallCosts(
                f"block{index}",
                before_nbytes=draw.randint(0, 9),
                nbytes=nbytes,
                cost=cost,
                operations_nbytes=results,
                extra_nbytes=draw.randint(0, results),
                operations_cost=draw.randint(0, cost),
            )
        )
    return PassCosts(tuple(found), draw.randint(0, 40))


@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_within_the_limit_is_cheaper(seed):
    costs = drawn(seed, 5)
    least, most = (costs.peak_nbytes(costs.all_at(level)) for level in (Level.NOTHING, Level.EVERYTHING))
    before = None
    for limit in range(least, most + 20, 7):
        levels = choose_levels(costs, limit)
        assert costs.peak_nbytes(levels) <= limit
        fitting = [one for one in product(Level, repeat=5) if costs.peak_nbytes(one) <= limit]
        assert costs.cost(levels) == pytest.approx(min(costs.cost(one) for one in fitting))
        assert before is None or costs.cost(levels) <= before
        before = costs.cost(levels)
    assert before == 0


def test_the_last_block_is_kept_for_nothing():
    """Its activations are there anyhow when its backward begins."""
    call = CallCosts("block", 10, 100, 1.0)
    costs = PassCosts((call,) * 4)
    assert choose_levels(costs, 140) == (*(Level.NOTHING,) * 3, Level.EVERYTHING)
    assert choose_levels(costs, 239).count(Level.EVERYTHING) == 1
    assert choose_levels(costs, 240).count(Level.EVERYTHING) == 2
    with pytest.raises(ConfigError) as caught:
        choose_levels(costs, 139)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("activation_checkpointing.memory_limit", 139)
    ]
    assert "140" in str(caught.value)


def test_what_comes_after_the_blocks_counts_at_the_end_of_the_forward():
    costs = PassCosts((CallCosts("block", 10, 100, 1.0),) * 4, after_nbytes=150)
    assert costs.peak_nbytes(costs.all_at(Level.NOTHING)) == 190
    assert Level.EVERYTHING not in choose_levels(costs, 190)
    assert choose_levels(costs, 290).count(Level.EVERYTHING) == 1


def test_many_unequal_blocks_are_chosen_soon():
    draw = random.Random(1)
    calls = tuple(
        CallCosts("block", 1000, draw.randint(10**6, 10**8), draw.random(), draw.randint(10**5, 10**6), 0, 0.01)
        for _ in range(200)
    )
    costs = PassCosts(calls)
    last = None
    for limit in (2 * 10**9, 3 * 10**9, 5 * 10**9):
        levels = choose_levels(costs, limit)
        assert costs.peak_nbytes(levels) <= limit
        assert last is None or costs.cost(levels) < last
        last = costs.cost(levels)


def test_only_allowed_levels_are_chosen():
    costs = drawn(3, 6)
    limit = costs.peak_nbytes(costs.all_at(Level.NOTHING)) + 30
    assert Level.OPERATIONS not in choose_levels(costs, limit, {Level.NOTHING, Level.EVERYTHING})


def test_a_choice_is_told_in_a_sentence():
    costs = PassCosts((CallCosts("block", 10, 100, 1.0),) * 4)
    levels = choose_levels(costs, 240)
    assert describe(costs, levels, str) == (
        "4 calls of blocks: 2 kept, 2 recomputed; activations take 240 of 440, "
        "and 50% of the blocks' work is done again"
    )
