"""Norms that are read later: when they have arrived, when they are asked for, and at most some steps late."""

from __future__ import annotations

from array import array
from math import inf, nan

import pytest

from polyaccel.accelerators.base import Event
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.types import DType
from polyaccel.engine.loss_scale import LossScaler
from polyaccel.engine.update_results import MOST_UNREAD, UpdateResults
from polyaccel.zero.update.global_norm import GradientNorm
from polyaccel.zero.update.grad_norm import read_sums, write_sums
from polyaccel.zero.update.optimizer_step import StepResult
from polyaccel.zero.update.unread_norm import NormReader, UnreadNorm

ACCELERATOR = CpuAccelerator("numpy")


class Point(Event):
    """A point of a device that is reached when a test says so, or when the host waits."""

    def __init__(self) -> None:
        self.reached = False
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        self.reached = True

    def is_reached(self) -> bool:
        return self.reached

    def elapsed_ms(self, later: Event) -> float:
        return 0.0


def update(norm: float, point: Point) -> StepResult:
    buffer = ACCELERATOR.allocate(1, DType.FLOAT64)
    found = GradientNorm(norm, None if abs(norm) < inf else "weight")
    return StepResult(True, UnreadNorm(point, (buffer, buffer), lambda _: found, lambda _: None))


def news(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().split()[1] for record in caplog.records if "not finite" in record.getMessage()]


def test_what_has_arrived_is_read_and_what_is_under_way_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    results, points = UpdateResults(LossScaler.from_config(loss_scale=1.0), speaks=True), [Point() for _ in range(4)]
    for step, (norm, point) in enumerate(zip((1.0, nan, 2.0, 3.0), points, strict=True), 1):
        results.add(step, update(norm, point))
        if step == 3:
            assert not results.has_applied_not_finite
            points[0].reached = points[1].reached = True
    assert news(caplog) == ["2"]
    assert results.has_applied_not_finite
    assert not any(point.waits for point in points)


def test_settling_waits_for_all(caplog: pytest.LogCaptureFixture) -> None:
    results, points = UpdateResults(LossScaler.from_config(loss_scale=1.0), speaks=True), [Point() for _ in range(3)]
    for step, point in enumerate(points, 1):
        results.add(step, update(inf if step == 3 else 1.0, point))
    results.settle()
    assert news(caplog) == ["3"]
    assert [point.waits for point in points] == [1, 1, 1]
    results.forget()
    assert not results.has_applied_not_finite


def test_the_host_waits_for_the_oldest_of_too_many(caplog: pytest.LogCaptureFixture) -> None:
    results = UpdateResults(LossScaler.from_config(loss_scale=1.0), speaks=True)
    points = [Point() for _ in range(MOST_UNREAD + 1)]
    for step, point in enumerate(points, 1):
        results.add(step, update(nan, point))
    assert news(caplog) == ["1"]
    assert [point.waits for point in points] == [1, *[0] * MOST_UNREAD]


def test_a_norm_is_read_once_from_memory_that_is_used_again() -> None:
    reader, vector = NormReader(ACCELERATOR), ACCELERATOR.allocate(2, DType.FLOAT64)
    reads = []
    for value in (3.0, 5.0):
        write_sums(vector, array("d", [value, 0.0]))

        def interpret(arrived: object) -> GradientNorm:
            reads.append(arrived)
            return GradientNorm(read_sums(arrived)[0], None)  # type: ignore[arg-type]

        unread = reader.start(vector, interpret)
        write_sums(vector, array("d", [9.0, 9.0]))
        result = StepResult(True, unread, 0.5)
        assert (result.has_arrived, result.grad_norm, result.clipped_norm) == (True, value, value / 2)
        assert result.first_nonfinite_param is None
    assert len(reads) == 2
    assert reads[0] is reads[1]
