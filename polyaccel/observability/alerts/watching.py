"""The alarms of a run: each rank sends its figures now and then, and rank 0 reports what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from logging import getLogger

from polyaccel.accelerators.base import MemoryStats
from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.observability.alerts.machines import MachineAlarms
from polyaccel.observability.alerts.replicas import ReplicaDigests, alarms_of_digests
from polyaccel.observability.alerts.settings import AlarmSettings, RankFigures
from polyaccel.observability.alerts.training import TrainingAlarms
from polyaccel.observability.metrics import Alarm, MetricSink, StepMetrics
from polyaccel.observability.timing import PhaseTimer
from polyaccel.zero.trained_state import TrainedParams

log = getLogger(__name__)
_WAITING = ("reduce", "publish")
"""Phases of a device's stream in which it waits for others."""


class RunAlarms:
    """Collects this rank's figures, and every few steps has rank 0 look at those of all.

    What rank 0 finds goes to its log and to `monitor`, the same about the same ranks once in `window` steps. `place` is
    this rank's stage of a pipeline.
    """

    def __init__(
        self, settings: AlarmSettings, communicator: Communicator, monitor: MetricSink, *, place: int = 0
    ) -> None:
        self._settings = settings
        self._communicator = communicator
        self._monitor = monitor
        self._recorder = communicator.recorder if isinstance(communicator, RecordingCommunicator) else None
        self._place = place
        self._totals = self._nothing()
        self._metrics: list[StepMetrics] = []
        self._timer: PhaseTimer | None = None
        self._params: Callable[[], TrainedParams] | None = None
        self._digests = ReplicaDigests(settings.replicas) if settings.replicas and communicator.world_size > 1 else None
        self._training, self._machines = TrainingAlarms(settings), MachineAlarms(settings)
        self._said: dict[tuple[str, tuple[int, ...]], int] = {}

    def attach(self, timer: PhaseTimer, params: Callable[[], TrainedParams]) -> None:
        """Count what `timer` waits for, and digest what `params` gives."""
        self._timer, self._params = timer, params
        if self._recorder is not None:
            recorder = self._recorder
            timer.waited = lambda: sum(recorder.waited_s.values())

    def before_update(self, step: int) -> None:
        """All passes of optimizer step `step` have ended, and its update has not begun."""
        if self._digests is not None and self._params is not None:
            self._totals.digests += self._digests.digest(step, self._params())

    def after_step(self, metrics: StepMetrics, memory: MemoryStats) -> None:
        """Optimizer step `metrics.step` has ended. Collective every few steps."""
        totals = self._totals
        if metrics.loss is not None:
            totals.losses[metrics.step] = metrics.loss
        totals.steps += 1
        totals.seconds += metrics.step_time_s or 0.0
        self._add_own(metrics)
        least = totals.memory_nbytes
        totals.memory_nbytes = memory.allocated_nbytes if least is None else min(least, memory.allocated_nbytes)
        totals.total_nbytes = memory.total_nbytes
        if self._communicator.rank == 0:
            self._metrics.append(metrics)
        if metrics.step % self._settings.every:
            return
        own, self._totals = totals.to_plain(), self._nothing()
        gathered = self._communicator.all_gather_bytes(json.dumps(own).encode())
        if self._communicator.rank == 0:
            self._look([RankFigures.from_plain(json.loads(one)) for one in gathered])

    def _nothing(self) -> RankFigures:
        return RankFigures(self._communicator.ranks[self._communicator.rank], self._place)

    def _add_own(self, metrics: StepMetrics) -> None:
        """What of the step was this rank's own work: by the device's clock where it has one."""
        waited_s = {} if self._timer is None else self._timer.take_waited()
        totals = self._totals
        if metrics.device_phase_s:
            phases = {name: one for name, one in metrics.device_phase_s.items() if name not in (*_WAITING, "outside")}
        elif self._recorder is not None or self._communicator.world_size == 1:
            phases = {name: max(0.0, one - waited_s.get(name, 0.0)) for name, one in metrics.phase_s.items()}
        else:
            totals.own_s = None
            return
        if totals.own_s is not None:
            for name, seconds in phases.items():
                totals.own_s[name] = totals.own_s.get(name, 0.0) + seconds

    def _look(self, totals: list[RankFigures]) -> None:
        for alarm in self._found(totals):
            key, before = (alarm.kind, alarm.ranks), self._said.get((alarm.kind, alarm.ranks))
            if before is None or alarm.step - before >= self._settings.window:
                self._said[key] = alarm.step
                log.warning("%s", alarm.sentence)
                self._monitor.write_alarm(alarm)

    def _found(self, totals: list[RankFigures]) -> Iterator[Alarm]:
        taken, self._metrics = self._metrics, []
        yield from alarms_of_digests(totals)
        for metrics in taken:
            yield from self._training.look(
                metrics, {one.rank: one.losses[metrics.step] for one in totals if metrics.step in one.losses}
            )
        if taken:
            yield from self._machines.look(taken[-1].step, totals)
