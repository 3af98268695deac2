"""The device's time is divided among phases without waiting for it, and nothing of it is lost or counted twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from polyaccel.accelerators.base import Event
from polyaccel.engine.recording import _shares
from polyaccel.observability.stats import DevicePhaseTimer
from polyaccel.observability.timing import PHASES, PhaseTimer


@dataclass
class Device:
    """A queue of work: `done_s` is how far the device has come, `queued_s` how far it will."""

    queued_s: float = 0.0
    done_s: float = 0.0
    events: list[Mark] = field(default_factory=list)

    def record(self) -> Mark:
        self.events.append(Mark(self, self.queued_s))
        return self.events[-1]


@dataclass
class Mark(Event):
    device: Device
    at_s: float

    def synchronize(self) -> None:
        raise AssertionError("nobody waits for the device")

    def is_reached(self) -> bool:
        return self.device.done_s >= self.at_s

    def elapsed_ms(self, later: Event) -> float:
        assert isinstance(later, Mark)
        return (later.at_s - self.at_s) * 1e3


def steps(device: Device, timer: PhaseTimer) -> Iterator[dict[str, float]]:
    """Steps of which the device takes 3 s for forward, 6 s for backward with 2 s of reductions inside, 1 s for
    evaluation, and 4 s for the update."""
    while True:
        with timer("forward"):
            device.queued_s += 3
        with timer("backward"):
            device.queued_s += 5
            with timer("reduce"):
                device.queued_s += 2
            device.queued_s += 1
        with timer("outside"), timer("forward"):
            device.queued_s += 1
        with timer("update"):
            device.queued_s += 4
        timer.take()
        yield timer.take_device()


def test_a_step_is_told_when_the_device_has_ended_it() -> None:
    device = Device()
    timer = PhaseTimer(DevicePhaseTimer(device.record))
    run = steps(device, timer)
    whole = {"forward": 3.0, "backward": 6.0, "reduce": 2.0, "outside": 1.0, "update": 4.0, "other": 0.0}
    assert next(run) == {}
    device.done_s = 15.9
    assert next(run) == {}
    device.done_s = 32.0
    assert next(run) == whole  # of the second step: that of the first is old
    assert next(run) == {}
    device.done_s = 64.0
    assert next(run) == whole


def test_a_host_without_laps_tells_nothing() -> None:
    timer = PhaseTimer()
    with timer("forward"):
        pass
    assert tuple(timer.take()) == PHASES
    assert timer.take_device() == {}


@pytest.mark.parametrize("seconds", [(1, 1, 1), (2, 3, 1), (0.004, 0.0, 1.2), (1e-9, 7, 7), (0, 0, 5)], ids=str)
def test_shares_add_up_to_a_hundred(seconds: tuple[float, ...]) -> None:
    said = _shares(dict(zip(("forward", "backward", "update"), seconds, strict=True)))
    assert sum(int(part.partition("(")[2].partition(" %")[0]) for part in said.split(", ")) == 100
