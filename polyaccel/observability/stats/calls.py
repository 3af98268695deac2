"""The collectives of a step, by operation: how many, what this rank sent, and how long it waited."""

from __future__ import annotations

from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.observability.metrics import CallFigures


class CallCounter:
    """What the flight recorder of `communicator` has counted since the last look; nothing where there is none."""

    def __init__(self, communicator: Communicator) -> None:
        self._recorder = communicator.recorder if isinstance(communicator, RecordingCommunicator) else None
        self._before: dict[str, tuple[int, float, float]] = {}

    def take(self) -> dict[str, CallFigures]:
        """The figures of each operation that was called since the last look, over all groups of this rank."""
        if self._recorder is None:
            return {}
        source = self._recorder
        now = {
            getattr(operation, "value", operation): (calls, source.sent_nbytes[operation], source.waited_s[operation])
            for operation, calls in source.calls.items()
        }
        before, self._before = self._before, now
        taken = {}
        for operation, (calls, sent, waited_s) in now.items():
            then_calls, then_sent, then_waited_s = before.get(operation, (0, 0.0, 0.0))
            if calls < then_calls:  # the count has begun at 0 again
                then_calls, then_sent, then_waited_s = 0, 0.0, 0.0
            if calls > then_calls or waited_s > then_waited_s:
                taken[operation] = CallFigures(
                    calls=calls - then_calls, sent_nbytes=round(sent - then_sent), waited_s=waited_s - then_waited_s
                )
        return taken
