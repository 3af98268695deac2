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
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.testkit.accelerator.memory import contents
from polyaccel.testkit.comparison import equal, same_numbers
from polyaccel.testkit.kernels.contract import encode
from polyaccel.testkit.progress import doing

_NUMEL = 1 << 20
_ATTEMPTS = 7
_WORK = 16  # fills of 4 MiB
_FILLS = 4 * _WORK


class StreamsContract(ABC):
    """Streams and events. A part of `AcceleratorContract`; on synchronous devices null streams pass it."""

    @abstractmethod
    def make(self) -> Accelerator: ...

    def test_a_stream_keeps_its_order(self) -> None:
        """Work of one stream runs in the order in which it was queued: the engine fills, reduces and updates by that
        order alone."""
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
            equal(copied.is_reached(), True, "is_reached() of an event that was waited for")
            same_numbers(contents(target), np.full(_NUMEL, float(last)), "a copy between two fills of its source")
        stream.synchronize()
        accelerator.synchronize()

    def test_bytes_are_read_when_the_current_stream_has_written_them(self) -> None:
        """`to_bytes` waits for what the current stream was given before, without the caller's help: checkpoints and
        messages are read so."""
        accelerator = self.make()
        source, target = (accelerator.allocate(_NUMEL, DType.FLOAT32) for _ in range(2))
        for stream in (accelerator.current_stream(), accelerator.new_stream()):
            stream.wait(accelerator.current_stream().record())
            for last in range(1, 3):
                with stream.use():
                    keep_busy(source, _WORK << last)
                    source.fill(last)
                    target.copy_from(source)
                    found = contents(target)
                same_numbers(found, np.full(_NUMEL, float(last)), "to_bytes after a fill and a copy")
            stream.synchronize()

    def test_bytes_that_were_given_may_change_at_once(self) -> None:
        """`from_bytes` has taken its bytes when it returns: callers use the memory again."""
        accelerator = self.make()
        buffer = accelerator.allocate(_NUMEL, DType.FLOAT32)
        keep_busy(buffer, _WORK)
        given = bytearray(encode(np.ones(_NUMEL), DType.FLOAT32))
        buffer.from_bytes(given)
        given[:] = bytes(len(given))
        same_numbers(contents(buffer), np.ones(_NUMEL), "from_bytes of bytes that changed afterwards")

    def test_streams_wait_for_events(self) -> None:
        """A stream that waits for an event of another reads what that has written, without the host's help: gathers
        and updates overlap by it."""
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
            equal(filled.is_reached(), True, "is_reached() of an event that a stream has waited for")
            same_numbers(contents(target), np.full(_NUMEL, float(last)), "a copy that waits for another stream's fill")
        other.synchronize()

    def test_streams_overlap_where_that_is_claimed(self) -> None:
        """Work on one stream ends while another is busy, where `streams` is claimed: the engine plans overlap by it."""
        accelerator = self.make()
        if not accelerator.capabilities().streams:
            raise SkipTest("does not claim streams")
        present, other = accelerator.current_stream(), accelerator.new_stream()
        little = accelerator.allocate(_NUMEL, DType.FLOAT32)
        for attempt in range(_ATTEMPTS):
            # More memory and not more fills: a device may end a small fill before the host has queued the next.
            much = accelerator.allocate(_NUMEL << attempt, DType.FLOAT32)
            accelerator.synchronize()
            with other.use():
                keep_busy(much, _FILLS)
            end = other.record()
            little.view(0, 1).fill(1)
            present.record().synchronize()
            is_over = end.is_reached()
            other.synchronize()
            if not is_over:
                return
        raise AssertionError(
            "streams=True is claimed, but work on one stream waits for all work on another: expected one fill to end "
            f"before {_FILLS} fills of {4 << _ATTEMPTS - 1} MiB on another stream, got it after them"
        )

    def test_events_measure_time(self) -> None:
        """Events measure, in milliseconds, at most the time that the host sees and about as much for long work: the
        breakdown of a step is made of them."""
        accelerator = self.make()
        stream = accelerator.current_stream()
        buffer = accelerator.allocate(_NUMEL, DType.FLOAT32)
        for attempt in range(_ATTEMPTS):
            accelerator.synchronize()
            measured_ms, host_ms = _measure(stream, buffer, _WORK << attempt)
            if not 0 <= measured_ms <= host_ms + 1:
                raise AssertionError(f"elapsed_ms: expected 0 to {host_ms:.3f}, the host's time, got {measured_ms:.3f}")
            if host_ms >= 5 and measured_ms >= host_ms / 10:
                return
        raise AssertionError(f"elapsed_ms: expected about {host_ms:.3f}, the host's time, got {measured_ms:.3f}")

    def test_events_are_reached_in_order(self) -> None:
        """An event of a stream is reached after all earlier ones, with a time that does not run backwards."""
        accelerator = self.make()
        stream = accelerator.current_stream()
        buffer = accelerator.allocate(_NUMEL, DType.FLOAT32)
        events: list[Event] = []
        for _ in range(4):
            keep_busy(buffer, _WORK)
            events.append(stream.record())
        events[2].synchronize()
        reached = [event.is_reached() for event in events[:3]]
        equal(reached, [True] * 3, "is_reached() of three events, of which the last was waited for")
        events[3].synchronize()
        gaps_ms = [one.elapsed_ms(later) for one, later in pairwise(events)]
        if min(gaps_ms) < 0:
            raise AssertionError(f"elapsed_ms between events in their order: expected 0 or more, got {gaps_ms}")


def keep_busy(buffer: Buffer, times: int) -> None:
    """Queue `times` fills of `buffer` on the present stream."""
    doing(f"{times} fills")
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
