"""Every moment of a step counts once, for the innermost phase."""

from __future__ import annotations

import pytest

from polyaccel.observability import timing
from polyaccel.observability.timing import OUTSIDE, PHASES, PhaseTimer


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", clock)
    return clock


def nonzero(timer: PhaseTimer) -> dict[str, float]:
    taken = timer.take()
    assert tuple(taken) == PHASES
    return {phase: seconds for phase, seconds in taken.items() if seconds}


def test_a_phase_adds_up_until_taken(clock: Clock) -> None:
    timer = PhaseTimer()
    for seconds in (1.0, 2.0):
        with timer("forward"):
            clock.now += seconds
        clock.now += 50.0  # outside any phase
    assert nonzero(timer) == {"forward": 3.0, "other": 100.0}
    assert nonzero(timer) == {}


def test_an_inner_phase_stops_the_outer(clock: Clock) -> None:
    timer = PhaseTimer()
    with timer("backward"):
        clock.now += 1.0
        with timer("reduce"):
            clock.now += 2.0
            with timer("reduce"):
                clock.now += 4.0
        clock.now += 8.0
    assert nonzero(timer) == {"backward": 9.0, "reduce": 6.0}


def test_a_phase_that_raises_is_closed(clock: Clock) -> None:
    timer = PhaseTimer()

    def fail() -> None:
        with timer("update"):
            clock.now += 1.0
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    clock.now += 1.0
    with timer("publish"):
        clock.now += 2.0
    assert nonzero(timer) == {"update": 1.0, "publish": 2.0, "other": 1.0}


def test_taking_inside_a_phase_charges_it_so_far(clock: Clock) -> None:
    timer = PhaseTimer()
    with timer("data"):
        clock.now += 1.0
        assert nonzero(timer) == {"data": 1.0}
        clock.now += 2.0
    assert nonzero(timer) == {"data": 2.0}


def test_what_is_outside_a_step_counts_for_no_phase_however_deep(clock: Clock) -> None:
    timer = PhaseTimer()
    with timer("forward"):
        clock.now += 1.0
        with timer(OUTSIDE):
            clock.now += 2.0
            with timer("publish"):  # evaluation gathers parameters too
                clock.now += 4.0
        clock.now += 8.0
    assert nonzero(timer) == {"forward": 9.0}


def test_an_unknown_phase_is_an_error() -> None:
    with pytest.raises(KeyError) as caught:
        PhaseTimer()("foreward")  # type: ignore[arg-type]
    assert caught.value.args == ("foreward",)
