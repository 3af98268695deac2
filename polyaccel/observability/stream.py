"""The stream of a run's records to its monitors: off the training thread, and never in its way."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from time import monotonic

from polyaccel.errors import PolyaccelError
from polyaccel.observability.metrics import Alarm, Event, Monitor, StepMetrics

log = getLogger(__name__)

MOST_WAITING = 10_000
"""Records that a slow monitor may be behind; of more than these the oldest are left out."""
INTERVAL_S = 0.05
"""A monitor's thread sleeps so long after it has written, lest it take turns with steps that are shorter."""
CLOSING_LIMIT_S = 30.0

_Record = StepMetrics | Alarm | tuple[Event, ...] | threading.Event
"""A step, an alarm, events, or the question whether all before has been written."""


class MonitorStream:
    """Hands the figures of each step, and events, to monitors: each on its own thread, so that none waits for a slow
    disk or a network, and none for another.

    A monitor that fails is closed and dropped with one line. What waits is written when the stream is closed, and when
    the process ends, an uncaught exception included; then a monitor that does not end within `limit_s` is left behind.
    """

    def __init__(
        self,
        monitors: Sequence[Monitor] = (),
        *,
        own: Monitor | None = None,
        pictures: Path | None = None,
        at_close: Sequence[Callable[[], object]] = (),
        limit_s: float = CLOSING_LIMIT_S,
    ) -> None:
        """`monitors` are open; they belong to the stream from here on, as does `own`, which gets this rank's steps on a
        rank without monitors. `pictures` is the folder of pictures (None: none are drawn). `at_close` is called once,
        when all has been written."""
        self._lanes = tuple(_MonitorWorker(monitor) for monitor in monitors)
        self._own = None if own is None else _MonitorWorker(own)
        self._pictures = pictures
        self._at_close = list(at_close)
        self._limit_s = limit_s
        if self._all_lanes or self._at_close:  # after the libraries have registered theirs, so that ours is first
            atexit.register(self.close)

    @property
    def _all_lanes(self) -> tuple[_MonitorWorker, ...]:
        return self._lanes if self._own is None else (*self._lanes, self._own)

    @property
    def enabled(self) -> bool:
        """Whether anybody writes down what is handed over: on rank 0, while a monitor is left."""
        return any(not lane.is_dropped for lane in self._lanes)

    @property
    def takes_steps(self) -> bool:
        """Whether anybody writes down the steps of this rank."""
        return any(not lane.is_dropped for lane in self._all_lanes)

    def write(self, metrics: StepMetrics) -> None:
        """Hand over the figures of a step."""
        for lane in self._all_lanes:
            lane.put(metrics)

    def write_alarm(self, alarm: Alarm) -> None:
        """Hand over what is wrong with the run."""
        for lane in self._lanes:
            lane.put(alarm)

    def write_events(self, events: Iterable[Event]) -> None:
        """Hand over figures of the user's own, as (tag, value, step). Raises PolyaccelError for anything else."""
        if not self._lanes:
            return
        taken = []
        for event in events:
            try:
                tag, value, step = event
                taken.append((str(tag), float(value), int(step)))
            except (TypeError, ValueError) as error:
                raise PolyaccelError(
                    f"{event!r} is not an event: {error}", hint='give ("tag", value, step), two numbers', value=event
                ) from error
        for lane in self._lanes:
            lane.put(tuple(taken))

    def add_picture(self, name: str, draw: Callable[[], str]) -> None:
        """Write the SVG picture that `draw` gives as the file `name` into the run's folder, where there is one."""
        if self._pictures is None:
            return
        try:
            (self._pictures / name).write_text(draw(), encoding="utf-8")
        except OSError as error:
            log.warning("the picture %s could not be written: %s", name, error)

    def flush(self, limit_s: float | None = None) -> bool:
        """Wait until the monitors have written all that was handed over. False where one has not within the limit."""
        end = monotonic() + (self._limit_s if limit_s is None else limit_s)
        asked = [lane.ask() for lane in self._all_lanes]
        return all(done.wait(max(0.0, end - monotonic())) for done in asked)

    def close(self) -> None:
        """Let all be written, and close the monitors. May be called twice."""
        atexit.unregister(self.close)
        end = monotonic() + self._limit_s
        for lane in self._all_lanes:
            lane.finish()
        for lane in self._all_lanes:
            lane.join(max(0.0, end - monotonic()))
        while self._at_close:
            try:
                self._at_close.pop(0)()
            except Exception as error:  # reporting on a run must not end it
                log.warning("a part of the run's records could not be closed: %s", error or repr(error))


class _MonitorWorker:
    """A monitor, what waits for it, and its thread, which begins with the first record."""

    def __init__(self, monitor: Monitor) -> None:
        self.is_dropped = False
        self._monitor = monitor
        self._waiting: deque[_Record] = deque()
        self._left_out = 0
        self._news = threading.Event()
        self._hurry = threading.Event()
        self._is_finishing = False
        self._thread: threading.Thread | None = None

    def put(self, record: _Record) -> None:
        if self.is_dropped or self._is_finishing:
            return
        if len(self._waiting) >= MOST_WAITING:
            with suppress(IndexError):  # the thread has been faster
                self._leave_out(self._waiting.popleft())
        self._waiting.append(record)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"polyaccel monitor {self._monitor.name}", daemon=True
            )
            self._thread.start()
        self._news.set()

    def ask(self) -> threading.Event:
        """What is set when all before has been written, or nothing will be."""
        done = threading.Event()
        if self._thread is not None:
            self.put(done)
            self._hurry.set()
        if self._thread is None or not self._thread.is_alive() or self._is_finishing:  # meanwhile, too
            done.set()
        return done

    def finish(self) -> None:
        """Write what waits, close the monitor, and end."""
        is_first, self._is_finishing = not self._is_finishing, True
        self._hurry.set()
        self._news.set()
        if self._thread is None and is_first:
            self._close_monitor()

    def join(self, limit_s: float) -> None:
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._thread.join(limit_s)
        if self._thread.is_alive():
            log.warning("monitor %s has not ended and is left behind: some figures may be missing", self._monitor.name)

    def _leave_out(self, record: _Record) -> None:
        if isinstance(record, threading.Event):
            record.set()
        self._left_out += 1
        if self._left_out == 1:
            log.warning("monitor %s is %d records behind: the oldest are left out", self._monitor.name, MOST_WAITING)

    def _run(self) -> None:
        try:
            while True:
                self._news.wait()
                self._news.clear()
                is_last = self._is_finishing
                while self._waiting:
                    self._hand_over(self._waiting.popleft())
                if is_last:
                    break
                self._hurry.wait(INTERVAL_S)
                self._hurry.clear()
        except BaseException as error:  # figures are worth less than training; SystemExit would end without a word
            log.warning("monitor %s failed and is dropped: %s", self._monitor.name, error or type(error).__name__)
        self.is_dropped = True
        while self._waiting:
            if isinstance(record := self._waiting.popleft(), threading.Event):
                record.set()
        self._close_monitor()

    def _hand_over(self, record: _Record) -> None:
        if isinstance(record, threading.Event):
            record.set()
        elif isinstance(record, tuple):
            self._monitor.write_events(record)
        elif isinstance(record, Alarm):
            self._monitor.write_alarm(record)
        else:
            self._monitor.write(record)

    def _close_monitor(self) -> None:
        try:
            self._monitor.close()
        except BaseException as error:
            log.warning("monitor %s could not be closed: %s", self._monitor.name, error or type(error).__name__)
