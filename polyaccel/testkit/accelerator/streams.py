"""The part of the accelerators' contract that is about time: the order of a stream's work, events, overlap.

Whether a device keeps an order shows only while it is busy, so every test first gives it much to do (`keep_busy`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise
from time import perf_counter
from unittest import SkipTest

import numpy as np

from polyaccel.accelerators.base import Accelerator, Event, Stream
from polyaccel.buffer import Buffer
from polyaccel.testkit.accelerator.memory import contents
from polyaccel.types import DType

_NUMEL = 1 << 20
_ATTEMPTS = 7
_WORK = 16  # fills of 4 MiB


class StreamsContract(ABC):
    """Streams and events. A part of `AcceleratorContract`; on synchronous devices null streams pass it."""

    @abstractmethod
    def make(self) -> Accelerator: ...

    def test_a_stream_keeps_its_order(self) -> None:
        accelerator = self.make()
        stream = accelerator.current_stream()
        source, target = (accelerator.allocate(_NUMEL, DType.FLOAT32) for _ in range(2))
        for last in (8, 9):
            keep_busy(source, _WORK)
            source.fill(last)
            target.copy_from(source)
            source.fill(0)
            copied = stream.record()
            copied.synchronize()
            assert copied.is_reached()
            np.testing.assert_array_equal(contents(target), np.full(_NUMEL, float(last)))
        stream.synchronize()
        accelerator.synchronize()

    def test_streams_wait_for_events(self) -> None:
        """A stream that waits for an event of another reads what that has written, without the host's help."""
        accelerator = self.make()
        present, other = accelerator.current_stream(), accelerator.new_stream()
        source, target = (accelerator.allocate(_NUMEL, DType.FLOAT32) for _ in range(2))
        for last in range(1, 4):
            other.wait(present.record())
            with other.use():
                keep_busy(source, _WORK << 2 * last)  # more each time: a busy host may stop a stream for a while
                source.fill(last)
            filled = other.record()
            present.wait(filled)
            target.copy_from(source)
            present.record().synchronize()
            assert filled.is_reached()
            np.testing.assert_array_equal(contents(target), np.full(_NUMEL, float(last)), err_msg="read too early")
        other.synchronize()

    def test_streams_overlap_where_that_is_claimed(self) -> None:
        accelerator = self.make()
        if not accelerator.capabilities().streams:
            raise SkipTest("does not claim streams")
        present, other = accelerator.current_stream(), accelerator.new_stream()
        much, little = (accelerator.allocate(_NUMEL, DType.FLOAT32) for _ in range(2))
        accelerator.synchronize()
        for attempt in range(_ATTEMPTS):
            with other.use():
                keep_busy(much, _WORK << attempt)
            end = other.record()
            little.view(0, 1).fill(1)
            present.record().synchronize()
            is_over = end.is_reached()
            other.synchronize()
            if not is_over:
                return
        raise AssertionError("streams=True is claimed, but work on one stream waits for all work on another")

    def test_events_measure_time(self) -> None:
        """Events measure at most the time that the host sees, and about as much once the device is quick to begin."""
        accelerator = self.make()
        stream = accelerator.current_stream()
        buffer = accelerator.allocate(_NUMEL, DType.FLOAT32)
        for attempt in range(_ATTEMPTS):
            accelerator.synchronize()
            measured_ms, host_ms = _measure(stream, buffer, _WORK << attempt)
            assert 0 <= measured_ms <= host_ms + 1, f"{measured_ms:.3f} ms of {host_ms:.3f} ms on the host"
            if host_ms >= 5 and measured_ms >= host_ms / 10:
                return
        raise AssertionError(f"events say {measured_ms:.3f} ms for work that took the host {host_ms:.3f} ms")

    def test_events_are_reached_in_order(self) -> None:
        accelerator = self.make()
        stream = accelerator.current_stream()
        buffer = accelerator.allocate(_NUMEL, DType.FLOAT32)
        events: list[Event] = []
        for _ in range(4):
            keep_busy(buffer, _WORK)
            events.append(stream.record())
        events[2].synchronize()
        assert all(event.is_reached() for event in events[:3]), "a later event was reached before an earlier one"
        events[3].synchronize()
        gaps_ms = [one.elapsed_ms(later) for one, later in pairwise(events)]
        assert min(gaps_ms) >= 0, f"time runs backwards: {gaps_ms}"


def keep_busy(buffer: Buffer, times: int) -> None:
    """Queue `times` fills of `buffer` on the present stream."""
    for turn in range(times):
        buffer.fill(-turn - 1)


def _measure(stream: Stream, buffer: Buffer, times: int) -> tuple[float, float]:
    """Milliseconds of `times` fills by events, and by the host's clock."""
    begin = perf_counter()
    start = stream.record()
    keep_busy(buffer, times)
    end = stream.record()
    end.synchronize()
    host_ms = (perf_counter() - begin) * 1e3
    start.synchronize()
    return start.elapsed_ms(end), host_ms
