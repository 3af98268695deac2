"""Stages are four rows of a table, and a policy that nobody could carry out does not exist."""

from __future__ import annotations

from itertools import product

import pytest

from polyaccel.errors import ShardingError
from polyaccel.zero.plan.policy import Placement, ZeroPolicy

R, S = Placement.REPLICATED, Placement.SHARDED


@pytest.mark.parametrize(("stage", "placements"), [(0, (R, R, R)), (1, (S, R, R)), (2, (S, S, R)), (3, (S, S, S))])
def test_a_stage_is_a_row_of_the_table(stage: int, placements: tuple[Placement, Placement, Placement]) -> None:
    assert ZeroPolicy.of_stage(stage) == ZeroPolicy(*placements)


@pytest.mark.parametrize("stage", [-1, 4, "two", None])
def test_other_stages_are_refused_by_name(stage: object) -> None:
    with pytest.raises(ShardingError) as caught:
        ZeroPolicy.of_stage(stage)  # type: ignore[arg-type]
    assert all(part in str(caught.value) for part in ("ZeRO", repr(stage)))
    assert caught.value.value == stage


@pytest.mark.parametrize("placements", list(product((R, S), repeat=3)))
def test_whoever_updates_everything_needs_everything(placements: tuple[Placement, Placement, Placement]) -> None:
    if placements[0] is R and S in placements[1:]:
        with pytest.raises(ShardingError) as caught:
            ZeroPolicy(*placements)
        assert caught.value.value == placements
    else:
        assert ZeroPolicy(*placements).optim is placements[0]
