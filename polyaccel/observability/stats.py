"""What is measured of a step in addition to the host's time: the device's, and the work that was done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from logging import getLogger

from polyaccel.accelerators import get_accelerator
from polyaccel.accelerators.base import Accelerator, Event
from polyaccel.accelerators.detect import host_accelerator
from polyaccel.comm.base import Communicator
from polyaccel.comm.default import default_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.observability.metrics import CallFigures
from polyaccel.utils.sizes import size


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
        """End a step with `charge`d phases; return seconds by phase of the last step that the device ended."""
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


log = getLogger(__name__)


def memory_in_use(accelerator: Accelerator) -> str:
    """The memory of the device, and of the host where that is another place."""
    host = host_accelerator(accelerator)
    kinds = [("device", accelerator)] if host is accelerator else [("device", accelerator), ("host", host)]
    said = []
    for name, kind in kinds:
        stats = kind.memory_stats()
        said.append(
            f"{name} {size(stats.allocated_nbytes)} in use, {size(stats.peak_nbytes)} at most, "
            f"{size(stats.reserved_nbytes)} reserved, {size(stats.free_nbytes)} free of {size(stats.total_nbytes)}"
        )
    return "; ".join(said)


def by_purpose(purposes: Iterable[tuple[str, int]]) -> str:
    """The bytes of each purpose, in words."""
    return ", ".join(f"{name} {size(nbytes)}" for name, nbytes in purposes if nbytes)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log on rank 0 the memory in use on its device and its host. DeepSpeed's name.

    Args:
        message: Text at the beginning of the log line.
        force: False does nothing, as in DeepSpeed.
    """
    if force and default_communicator().rank == 0:
        log.info("%s: %s", message, memory_in_use(get_accelerator()))


BACKWARD_FACTOR = 2
"""A backward pass has as many operations as two forward passes: a product for each operand of a product."""


class WorkCounter:
    """Counts what this rank's micro-batches ask of the model, until a step takes it.

    Operations are the model's: those of a forward pass, and twice as many for its backward. What is computed again
    because activations were not kept is not progress, and not counted.
    """

    def __init__(self, *, enabled: bool, streams_of_batches: int) -> None:
        """`streams_of_batches`: how many ranks have their own batches."""
        self.enabled = enabled
        self.streams_of_batches = streams_of_batches
        self.ranks_here = 1
        """Ranks whose work this process counts."""
        self.measure_peak: Callable[[], float | None] = lambda: None
        """Operations a second of the device, measured with a large product; None where it cannot be measured."""
        self._tokens = 0
        self._operations = 0.0
        self._peak: float | None = None
        self._knows_peak = False

    def add(self, tokens: int, forward_operations: float) -> None:
        """Count a micro-batch that is trained on."""
        self._tokens += tokens
        self._operations += forward_operations * (1 + BACKWARD_FACTOR)

    def needs_peak(self) -> bool:
        """Whether `know_peak` is due, which takes a moment."""
        return self.enabled and not self._knows_peak and self._operations > 0

    def know_peak(self) -> None:
        """Measure the device, once."""
        self._knows_peak = True
        self._peak = self.measure_peak()

    def take(self, seconds: float) -> dict[str, float]:
        """Return a step's figures by `StepMetrics` names; uncounted ones are left out."""
        tokens, operations = self._tokens, self._operations
        self._tokens, self._operations = 0, 0.0
        found: dict[str, float] = {}
        if tokens:
            found["tokens_per_s"] = tokens * self.streams_of_batches / seconds
        if operations:
            a_rank = operations / self.ranks_here / seconds
            found["tflops"] = a_rank / 1e12
            if self._peak is not None:
                found["model_flops_utilisation"] = a_rank / self._peak
        return found
