"""The rounds in which ranks read a save: everything that is wanted comes, once per group, and fits the windows."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.checkpoint.load.cooperative.rounds import ALIGNMENT_NBYTES, ScheduledRead, plan_rounds, window_for
from polyaccel.errors import InvariantError


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[tuple[int, list[int]]], list[int], list[set[int]], list[list[int]], int]:
    """(wanted, lengths, holders, groups, window)."""
    world = draw(st.integers(1, 7))
    group_of = draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))
    groups = [ranks for number in range(4) if (ranks := [rank for rank in range(world) if group_of[rank] == number])]
    nbytes = draw(st.lists(st.integers(1, 400), max_size=24))
    some_groups = st.sets(st.integers(0, len(groups) - 1), min_size=1)
    holders = [draw(some_groups) for _ in nbytes]
    some_ranks = st.sets(st.integers(0, world - 1), min_size=1)
    wanted = [(extent, sorted(draw(some_ranks))) for extent in range(len(nbytes)) if draw(st.booleans())]
    return wanted, nbytes, holders, groups, window_for(nbytes, draw(st.integers(1, 600)))


@given(plans())
def test_what_is_wanted_comes_once_into_each_group_that_wants_it_and_fits(
    plan: tuple[list[tuple[int, list[int]]], list[int], list[set[int]], list[list[int]], int],
) -> None:
    wanted, nbytes, holders, groups, window_nbytes = plan
    rounds = plan_rounds(wanted, nbytes, lambda extent: holders[extent], groups, window_nbytes)
    assert [carried.extent for one in rounds for carried in one] == [extent for extent, _ in wanted]
    by_extent = {carried.extent: carried for one in rounds for carried in one}
    for extent, ranks in wanted:
        carried = by_extent[extent]
        reached = [landing.group for landing in carried.landings]
        assert len(set(reached)) == len(reached)
        for group, members in enumerate(groups):
            here = set(members) & set(ranks)
            landing = carried.landing(group)
            assert landing is not None or not here
            if landing is not None:
                assert landing.rank in members
                assert landing.source in holders[extent]
                source = carried.landing(landing.source)
                assert source is not None
                assert source.source == source.group  # it reads for itself what it gives
                assert landing.is_shared == (len(here) > 1)
                assert landing.is_shared or not here or {landing.rank} == here
                assert here or any(other.source == group for other in carried.landings if other.group != group)
    for one in rounds:
        assert_windows_hold(one, nbytes, window_nbytes)


def assert_windows_hold(one: tuple[ScheduledRead, ...], nbytes: list[int], window_nbytes: int) -> None:
    """No two extents of a round share a byte of a window, and no rank needs more than its windows."""
    used: dict[tuple[int, bool], int] = defaultdict(int)
    for carried in one:
        for landing in carried.landings:
            assert landing.offset == used[landing.rank, landing.is_shared]
            assert landing.offset % ALIGNMENT_NBYTES == 0
            used[landing.rank, landing.is_shared] += -(-nbytes[carried.extent] // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
    for rank, _ in list(used):
        assert used[rank, False] + used[rank, True] <= window_nbytes


def test_ranks_of_a_group_read_alike_what_all_of_them_want() -> None:
    (one,) = plan_rounds([(extent, [0, 1]) for extent in range(8)], [100] * 8, lambda _: (0,), [[0, 1]], 1024)
    assert [carried.landings[0].rank for carried in one] == [0, 1] * 4


def test_groups_read_alike_for_one_that_has_nothing() -> None:
    rounds = plan_rounds([(extent, [2]) for extent in range(8)], [64] * 8, lambda _: (0, 1), [[0], [1], [2]], 256)
    assert [landing.source for one in rounds for carried in one for landing in carried.landings[-1:]] == [0, 1] * 4


def test_what_nobody_has_is_never_planned() -> None:
    with pytest.raises(InvariantError) as caught:
        plan_rounds([(0, [0])], [10], lambda _: (), [[0]], 128)
    assert all(part in str(caught.value) for part in ("0", "64"))
