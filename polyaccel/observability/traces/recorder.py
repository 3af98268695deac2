"""The trace of one rank: phases, units, collectives and pipeline operations of a few steps."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from logging import getLogger
from pathlib import Path
from time import time
from typing import Any, Protocol

from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import Entry, RecordingCommunicator
from polyaccel.observability.run_log import TRACE_FILE
from polyaccel.observability.timing import PhaseTimer
from polyaccel.observability.traces.chrome import Span, clock_offsets, kept_events, write_trace

log = getLogger(__name__)


class StepProfiler(Protocol):
    """A framework's own profiler."""

    framework: str

    def start(self) -> None:
        """Begin. Raises RuntimeError where another profiler is at work."""

    def stop(self) -> tuple[Sequence[Mapping[str, Any]], float]:
        """End; return Chrome's trace events and the shift to this rank's wall clock in microseconds."""


class RunTrace:
    """Records the optimizer steps `first` to `last` of this rank, and writes those of all ranks to one file in `folder`
    when the last has ended. A run that continues behind `first` begins at once; one that ends before `last` writes
    none.
    `wants_profiler`: what the framework's own profiler records goes there too.
    """

    def __init__(
        self, communicator: Communicator, first: int, last: int, folder: Path, *, wants_profiler: bool = False
    ) -> None:
        self.is_on = False
        self.wants_profiler = wants_profiler
        self._profiler: StepProfiler | None = None
        self._is_profiling = False
        self._communicator = communicator
        self._first, self._last, self._folder = first, last, folder
        self._recorder = communicator.recorder if isinstance(communicator, RecordingCommunicator) else None
        self._timer: PhaseTimer | None = None
        self._spans: list[Span] = []
        self._open: list[tuple[str, float]] = []
        self._open_units: dict[str, float] = {}
        self._sources: list[Callable[[], Iterable[tuple[str, float, float]]]] = []
        self._step_began_s = 0.0

    def attach(self, timer: PhaseTimer) -> None:
        """Record the phases of `timer`."""
        self._timer = timer

    def profile_by(self, profiler: StepProfiler) -> None:
        """Let `profiler` record the traced steps, if that is wanted."""
        self._profiler = profiler if self.wants_profiler else None

    def add_source(self, source: Callable[[], Iterable[tuple[str, float, float]]]) -> None:
        """At the end of each traced step, take the operations of a pipeline that `source` gives: name, begin, end."""
        self._sources.append(source)

    def span(self, kind: str, name: str, begin_s: float, end_s: float, **more: Any) -> None:
        """Record what lay between two moments of this rank's wall clock."""
        self._spans.append(Span(kind, name, begin_s, end_s, more))

    def begin_unit(self, unit: str) -> None:
        """The backward pass of a unit has begun. It ends by `end_unit`, or with the backward pass."""
        self._open_units.setdefault(unit, time())

    def end_unit(self, unit: str) -> None:
        began_s = self._open_units.pop(unit, None)
        if began_s is not None:
            self.span("unit", f"backward {unit}", began_s, time())

    def after_step(self, step: int) -> None:
        """Optimizer step `step` has ended on this rank (0: none yet). Collective at the end of the last."""
        now_s = time()
        if self.is_on and step >= self._first:
            for source in self._sources:
                self._spans += (Span("pipeline", *operation) for operation in source())
            self.span("step", f"step {step}", self._step_began_s, now_s, step=step)
            if step >= self._last:
                self._finish()
                return
        elif self._first <= step + 1 <= self._last:
            self._start()
        self._step_began_s = now_s

    def _start(self) -> None:
        self.is_on = True
        self._spans.clear()
        if self._recorder is not None:
            self._recorder.kept = []
        if self._timer is not None:
            self._timer.on_lap = self._on_lap
        if self._profiler is not None:
            try:
                self._profiler.start()
                self._is_profiling = True
            except RuntimeError as error:
                log.warning("the trace has nothing of the profiler of %s: %s", self._profiler.framework, error)

    def _on_lap(self, phase: str, begins: bool) -> None:
        now_s = time()
        if begins:
            self._open.append((phase, now_s))
        elif self._open:
            name, began_s = self._open.pop()
            if name == "backward":
                for unit in list(self._open_units):
                    self.end_unit(unit)
            self.span("phase", name, began_s, now_s)

    def _finish(self) -> None:
        self.is_on = False
        profiled: list[list[Any]] = []
        if self._profiler is not None and self._is_profiling:
            self._is_profiling = False
            profiled = kept_events(self._profiler.framework, *self._profiler.stop())
        if self._timer is not None:
            self._timer.on_lap = None
        if self._recorder is not None:
            calls, self._recorder.kept = self._recorder.kept or [], None
            for call in calls:
                self._add_call(call)
        self._open.clear()
        self._open_units.clear()
        payload = {"spans": [asdict(span) for span in self._spans], "profiled": profiled}
        data = zlib.compress(json.dumps(payload).encode())
        self._spans.clear()
        offsets = clock_offsets(self._communicator)
        gathered = self._communicator.all_gather_bytes(data)
        if self._communicator.rank != 0:
            return
        everything = [json.loads(zlib.decompress(one)) for one in gathered]
        spans = [[Span(**span) for span in one["spans"]] for one in everything]
        ranks = self._communicator.ranks
        of_profilers = {rank: one["profiled"] for rank, one in zip(ranks, everything, strict=True)}
        path = self._folder / TRACE_FILE
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_trace(path, ranks, spans, offsets, of_profilers)
        except OSError as error:
            log.warning("the trace could not be written: %s", error)
            return
        log.info("the trace of steps %d to %d is in %s: `polyaccel trace %s` shows where the time went",
                 self._first, self._last, path, self._folder)  # fmt: skip

    def _add_call(self, call: Entry) -> None:
        ended_s = call.ended_s if call.ended_s is not None else time()
        made = call.collective
        self.span(
            "collective",
            made.operation.value,
            call.started_s,
            ended_s,
            group=list(call.group),
            number=call.seq,
            waited_s=max(0.0, ended_s - (call.started_s if call.waited_s is None else call.waited_s)),
            numel=made.numel,
            dtype=None if made.dtype is None else made.dtype.value,
            label=made.label,
            bucket=made.bucket,
        )
