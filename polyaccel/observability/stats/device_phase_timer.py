"""The device's time by phase: events between the phases of a step, read when the device has passed them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from polyaccel.accelerators.base import Event

_MOST_PENDING = 8


class DevicePhaseTimer:
    """Divides the time of the device's current stream among the phases in which the host queued its work.

    An event stands at each end of a phase, without waiting for it. So a step's times are there when the device has
    passed its last event, which is usually while the next step runs. They add up to the time between two of these last
    events: a stream that idles, or waits for another, does so in the phase whose work waits.
    """

    def __init__(self, record: Callable[[], Event]) -> None:
        """`record` marks the present end of the current stream."""
        self._record = record
        self._marks: list[tuple[str, Event]] = []
        self._pending: deque[tuple[Event, list[tuple[str, Event]]]] = deque(maxlen=_MOST_PENDING)
        self._begin = record()

    def charge(self, phase: str) -> None:
        """What the device does from the last mark to here belongs to `phase`."""
        self._marks.append((phase, self._record()))

    def take(self) -> dict[str, float]:
        """End a step, before whose end `charge` was called. Returns the seconds by phase of the last step that the
        device has ended; empty where it has ended none since the last call."""
        self._pending.append((self._begin, self._marks))
        if self._marks:
            self._begin = self._marks[-1][1]
        self._marks = []
        found: dict[str, float] = {}
        while self._pending:
            begin, marks = self._pending[0]
            if marks and not marks[-1][1].is_reached():
                break
            self._pending.popleft()
            found = {}
            for phase, mark in marks:
                found[phase] = found.get(phase, 0.0) + begin.elapsed_ms(mark) / 1e3
                begin = mark
        return found
