"""Whether ranks have memory for one gather of all parameters."""

from __future__ import annotations

from polyaccel.zero.plan.whole_model import FreeMemory, fits_whole


def test_ranks_that_share_memory_need_it_together() -> None:
    assert fits_whole([FreeMemory("host", 25, 100), FreeMemory("host", 25, 120)])
    assert not fits_whole([FreeMemory("host", 26, 100), FreeMemory("host", 25, 120)])
    assert fits_whole([FreeMemory("host 0", 50, 100), FreeMemory("host 1", 50, 120)])
    assert not fits_whole([FreeMemory("host 0", 50, 100), FreeMemory("host 1", 50, 99)])


def test_keys_and_values_come_first() -> None:
    assert fits_whole([FreeMemory("host", 40, 100, 20)])
    assert not fits_whole([FreeMemory("host", 41, 100, 20)])
    assert not fits_whole([FreeMemory("host", 20, 100, 20), FreeMemory("host", 20, 100, 1)])
    assert not fits_whole([FreeMemory("host", 1, 100, 200)])


def test_nothing_to_gather_needs_no_memory() -> None:
    assert fits_whole([FreeMemory("host", 0, 0)])
