"""Boundaries, steps and samples are counted as DeepSpeed counts them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.engine.counters import StepCounters
from polyaccel.errors import CheckpointError, ConfigError

accumulations = st.integers(1, 7)


def counters(accumulation: int = 3, batch: int = 24) -> StepCounters:
    return StepCounters(gradient_accumulation_steps=accumulation, train_batch_size=batch)


@given(accumulation=accumulations, skips=st.lists(st.booleans(), max_size=40))
def test_every_nth_micro_batch_is_a_boundary(accumulation: int, skips: list[bool]) -> None:
    count = counters(accumulation)
    boundaries, skipped = 0, 0
    for micro_step, skip in enumerate(skips, start=1):
        expected = micro_step % accumulation == 0
        assert count.is_boundary is expected
        assert count.advance(skipped=skip) is expected
        assert count.step_applied is (expected and not skip)
        boundaries += expected
        skipped += expected and skip
        assert (count.micro_steps, count.global_steps, count.skipped_steps) == (micro_step, boundaries, skipped)
        assert count.global_samples == 24 * boundaries


def test_a_boundary_set_by_hand_stays_until_taken_back() -> None:
    count = counters(accumulation=2)
    count.set_gradient_accumulation_boundary(False)
    assert [count.advance() for _ in range(3)] == [False, False, False]
    count.set_gradient_accumulation_boundary(True)
    assert [count.advance() for _ in range(2)] == [True, True]
    count.set_gradient_accumulation_boundary(None)
    assert [count.advance() for _ in range(3)] == [True, False, True]
    assert (count.micro_steps, count.global_steps) == (8, 4)


@given(before=accumulations, after=accumulations, done=st.integers(0, 40))
def test_after_a_resume_the_next_boundary_is_a_whole_accumulation_away(before: int, after: int, done: int) -> None:
    saved, resumed = counters(before), counters(after)
    for step in range(done):
        saved.advance(skipped=step % 5 == 0)
    resumed.load_state_dict(saved.state_dict())
    assert [resumed.is_boundary, *(resumed.advance() for _ in range(after))].count(True) == 1 + (after == 1)
    assert resumed.step_applied
    assert resumed.global_steps == saved.global_steps + 1
    assert resumed.global_samples == saved.global_samples + 24
    assert resumed.skipped_steps == saved.skipped_steps


@given(accumulation=accumulations, steps=st.integers(0, 9))
def test_a_state_between_steps_comes_back_unchanged(accumulation: int, steps: int) -> None:
    saved, resumed = counters(accumulation), counters(accumulation)
    for _ in range(steps * accumulation):
        saved.advance()
    resumed.load_state_dict(saved.state_dict())
    assert resumed.state_dict() == saved.state_dict()


def test_sizes_can_change_between_steps() -> None:
    count = counters(accumulation=2, batch=8)
    count.advance()
    count.advance()
    count.set_batch(gradient_accumulation_steps=1, train_batch_size=4)
    assert count.advance()
    assert count.global_samples == 12


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        counters(accumulation=0, batch=-1)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("gradient_accumulation_steps", 0),
        ("train_batch_size", -1),
    ]


@pytest.mark.parametrize("change", [{"global_steps": -1}, {"micro_steps": None}, {"gradient_accumulation_steps": 0}])
def test_a_broken_state_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        counters().load_state_dict(counters().state_dict() | change)
    assert next(iter(change)) in str(caught.value)
