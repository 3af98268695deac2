"""Figures of a step and monitors that write them. Read first: `StepMetrics`, `Monitor`.

A monitor is a plugin of the entry-point group `polyaccel.monitors`; `JsonlMonitor` needs no package. It is opened on
rank 0 only, in the main thread. A separate thread writes to it and closes it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Protocol, TextIO

from polyaccel.core.types import Probe
from polyaccel.errors import ConfigError, InvariantError, Problem

Event = tuple[str, float, int]
"""A figure of the user's own: tag, value, step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A problem of a run, found by a threshold.

    Attributes:
        kind: "loss", "grad_norm", "replicas", "straggler", "data" or "memory".
    """

    kind: str
    step: int
    """Optimizer step in which it was detected, or the last one of its window."""
    sentence: str
    """What is wrong, and its hint."""
    value: float
    """Figure that passed its threshold, in the threshold's unit; NaN for one that is not finite."""
    ranks: tuple[int, ...] = ()
    """Global ranks that are concerned; empty for all."""

    @property
    def event(self) -> Event:
        """The alarm as a figure, for monitors that can only write figures."""
        return f"alarms/{self.kind}", self.value, self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFigures:
    """Tokens of a step by expert of a layer. All figures except exchanges are those of all ranks together."""

    tokens: tuple[int, ...]
    """Tokens that each expert computed."""
    dropped_share: float
    """Share of all choices that were dropped because an expert was full."""
    balance: float
    """Most tokens of an expert divided by the mean; 1 is even."""
    exchanged_nbytes: int
    """Bytes that this rank sent in dispatch and combine, in forward and backward passes."""
    exchange_s: float
    """Seconds of this rank's exchanges, waiting for others included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFigures:
    """This rank's collectives of one operation in a step.

    Attributes:
        calls: Number of collectives.
    """

    calls: int
    sent_nbytes: int
    """Bytes that this rank sent to others."""
    waited_s: float
    """Seconds that the host only waited for them, shortest on the rank that comes last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step as one rank saw it. None where a figure was not taken.

    Attributes:
        loss: Mean over the step's micro-batches, unscaled.
        lr: Learning rate of each optimizer group.
        grad_norm: Global norm *before* clipping, unscaled.
        grad_norm_clipped: Global norm of the gradients that the optimizer got, unscaled.
        gradient_noise_scale: Gradient noise scale in samples, smoothed over steps (`gradient_noise_scale`).
        loss_scale: Factor of the loss in the backward pass.
        tokens_per_s: Tokens of all ranks a second.
    """

    step: int
    """`global_steps` after this step, from 1."""
    loss: float | None
    lr: tuple[float, ...]
    grad_norm: float | None = None
    grad_norm_clipped: float | None = None
    gradient_noise_scale: float | None = None
    loss_scale: float = 1.0
    skipped: bool = False
    """Whether gradients were not finite on some rank, so that the update was not applied."""
    samples: int = 0
    """Samples of all ranks since training began."""
    step_time_s: float | None = None
    """Seconds since the step before, without evaluation and without saving and loading checkpoints."""
    samples_per_s: float | None = None
    """Samples of all ranks a second."""
    tokens_per_s: float | None = None
    tflops: float | None = None
    """Floating-point operations of the model by each rank in a second, in 10^12. None unless `timers.throughput` counts
    them."""
    model_flops_utilisation: float | None = None
    """`tflops` as a share of the device's speed in a large matrix product."""
    peak_memory_nbytes: int | None = None
    """Peak of device memory in use on this rank."""
    traffic_numel: int | None = None
    """Elements that this rank sent to others in this step."""
    phase_s: Mapping[str, float] = field(default_factory=dict)
    """Host seconds by phase (`PhaseTimer`), whose sum is `step_time_s`."""
    memory_nbytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes by purpose at the end of the step, in the terms of `polyaccel plan`, where monitors write or
    `memory_breakdown` is on. They are counted from this rank's buffers; buffers that live only inside a step count with
    their peak so far. `in use` is all memory in use on the device."""
    planned_nbytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes by purpose that the plan of the step predicted: in the first step, and when it changes."""
    experts: Mapping[str, ExpertFigures] = field(default_factory=dict)
    """Figures by layer, with `expert_parallel.log_load`."""
    collectives: Mapping[str, CallFigures] = field(default_factory=dict)
    """Figures by operation."""
    device_phase_s: Mapping[str, float] = field(default_factory=dict)
    """Device seconds by phase in the last step that the device has ended, usually the one before. `outside` is time
    that is not part of a step. With `wall_clock_breakdown` or `alarms`, on a device with streams."""

    def scalars(self) -> Iterator[Event]:
        """List the figures that were taken, for a dashboard of curves.

        Yields:
            (tag, value, step). Tags are the names of the fields; `lr_1` is the second group's, `phase_s/backward` a
            phase's, `experts/LAYER/balance` a layer's, `collectives/all_gather/calls` an operation's.
        """
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("step", "skipped") or value is None:
                continue
            if each.name == "lr":
                yield from (("lr" if not at else f"lr_{at}", float(lr), self.step) for at, lr in enumerate(value))
            elif each.name in ("experts", "collectives"):
                for part, figures in value.items():
                    numbers = {name: one for name, one in asdict(figures).items() if isinstance(one, (int, float))}
                    yield from ((f"{each.name}/{part}/{name}", float(one), self.step) for name, one in numbers.items())
            elif isinstance(value, Mapping):
                yield from ((f"{each.name}/{name}", float(one), self.step) for name, one in value.items())
            else:
                yield each.name, float(value), self.step

    def as_record(self) -> dict[str, Any]:
        """Return the figures by name, ready for strict JSON. See `json_safe` for those that are not finite."""
        return json_safe(asdict(self))


def json_safe(record: Mapping[str, Any]) -> dict[str, Any]:
    """Replace every NaN and infinity, which JSON cannot express, by None.

    Args:
        record: Values for JSON, nested at will. It stays as it is.

    Returns:
        A copy. Where a value was replaced, the new key `nonfinite` maps its dotted place to `nan`, `inf` or `-inf`, so
        that a reader can distinguish an overflow from a figure that was not taken.
    """
    nonfinite: dict[str, str] = {}

    def clean(value: Any, place: str) -> Any:
        if isinstance(value, float) and not isfinite(value):
            nonfinite[place] = repr(value)
            return None
        if isinstance(value, Mapping):
            return {key: clean(item, f"{place}.{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(item, f"{place}.{index}") for index, item in enumerate(value)]
        return value

    cleaned = {key: clean(value, key) for key, value in record.items()}
    return {**cleaned, "nonfinite": nonfinite} if nonfinite else cleaned


class MetricSink(Protocol):
    """Destination of an engine's figures: the monitors on rank 0, nothing on the others."""

    @property
    def enabled(self) -> bool:
        """Whether a monitor writes what is handed over."""

    @property
    def takes_steps(self) -> bool:
        """Whether anything takes the steps of this rank."""

    def write(self, metrics: StepMetrics) -> None:
        """Hand over the figures of a step. Does not block.

        Args:
            metrics: Figures of the step.
        """

    def write_events(self, events: Iterable[Event]) -> None:
        """Hand over the user's own figures. Does not block.

        Args:
            events: (tag, value, step) of each.
        """

    def add_picture(self, name: str, draw: Callable[[], str]) -> None:
        """Write an SVG picture into the run's folder, where there is one.

        Args:
            name: Name of the file.
            draw: Returns the SVG text. Called only where there is a folder.
        """

    def write_alarm(self, alarm: Alarm) -> None:
        """Hand over a problem of the run. Does not block.

        Args:
            alarm: The problem.
        """

    def close(self) -> None:
        """Write everything that was handed over. May be called twice."""


class Monitor(ABC):
    """A destination of metrics: a file or a dashboard. Constructing it must be cheap and must open nothing."""

    API_VERSION: ClassVar[tuple[int, int]] = (2, 0)
    name: ClassVar[str]
    """The entry point's name."""

    @classmethod
    def probe(cls) -> Probe:
        """Return whether the monitor could be used here, such as whether its packages are installed. Opens nothing."""
        return Probe(usable=True, reason="needs nothing")

    @abstractmethod
    def open(self, directory: Path, options: Mapping[str, Any]) -> None:
        """Begin or continue a run. Called in the main thread of rank 0; `write` and `close` run in a separate thread.

        Args:
            directory: Folder of the run's files, which may not exist yet.
            options: Options of the plugin, as the user wrote them.

        Raises:
            ConfigError: An option is unknown or invalid.
        """

    def write(self, metrics: StepMetrics) -> None:
        """Write one step. The default writes the figures as events.

        Args:
            metrics: Figures of the step. Losses may be NaN.
        """
        self.write_events(metrics.scalars())

    @abstractmethod
    def write_events(self, events: Iterable[Event]) -> None:
        """Write the user's own figures.

        Args:
            events: (tag, value, step) of each, as any iterable.
        """

    def write_alarm(self, alarm: Alarm) -> None:
        """Write a problem of the run. The default writes its figure as an event.

        Args:
            alarm: The problem.
        """
        self.write_events([alarm.event])

    @abstractmethod
    def close(self) -> None:
        """Write buffered metrics. May be called twice, and without `open`."""

    def read(self, directory: Path, options: Mapping[str, Any]) -> Iterable[tuple[str, float | None, int]] | None:
        """Read back what closed monitors have written for a run. Tests use it.

        Args:
            directory: Folder of the run's files.
            options: Options of the plugin.

        Returns:
            (tag, value, step): the loss of each step under the tag `loss`, and events. A value that was not finite may
            be None. Other figures may be among them. None where the monitor cannot read what it has written.
        """
        return None


class JsonlMonitor(Monitor):
    """Appends one JSON object a line to a file in the run's directory, flushed line by line.

    A step is its `StepMetrics.as_record()`. An event is `{"tag": ..., "value": ..., "step": ...}`. An alarm is an event
    with its sentence as `alarm`, and `ranks`. A resumed run continues in the same file, so steps after the checkpoint
    appear twice and the later line counts.

    Args:
        file_name: Name of the file.
    """

    name = "jsonl"
    FILE_NAME: ClassVar[str] = "metrics.jsonl"

    def __init__(self, file_name: str = FILE_NAME) -> None:
        self._file_name = file_name
        self._file: TextIO | None = None

    def open(self, directory: Path, options: Mapping[str, Any]) -> None:
        """Create the directory and the file if needed. An unfinished last line, of a killed run, is cut off.

        Args:
            directory: Folder of the run's files.
            options: There are none.

        Raises:
            ConfigError: An option was given, or the file cannot be opened.
        """
        if options:
            raise ConfigError([Problem(f"jsonl.{key}", value, "has no such option") for key, value in options.items()])
        self.close()
        path = Path(directory) / self._file_name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            cut_unfinished_line(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            problem = Problem("jsonl", str(path), f"cannot be written: {error}", "choose another output directory")
            raise ConfigError([problem]) from error

    def write(self, metrics: StepMetrics) -> None:
        self._append(metrics.as_record())

    def write_events(self, events: Iterable[tuple[str, float, int]]) -> None:
        for tag, value, step in events:
            self._append(json_safe({"tag": tag, "value": float(value), "step": step}))

    def write_alarm(self, alarm: Alarm) -> None:
        tag, value, step = alarm.event
        said = {"alarm": alarm.sentence, "ranks": list(alarm.ranks)}
        self._append(json_safe({"tag": tag, "value": value, "step": step, **said}))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self, directory: Path, options: Mapping[str, Any]) -> Iterable[tuple[str, float | None, int]]:
        for line in Path(directory, self._file_name).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            yield record.get("tag", "loss"), record.get("value", record.get("loss")), record["step"]

    def _append(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            raise InvariantError("a monitor was written to before it was opened, or after it was closed", value=record)
        # One write of a whole line: a reader that follows the file never sees half of one.
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()


def cut_unfinished_line(path: Path) -> None:
    """Truncate a file after its last line end. Does nothing if it does not exist.

    Args:
        path: The file.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        keep = file.seek(0, 2)
        while keep:
            begin = max(0, keep - 4096)
            file.seek(begin)
            line_end = file.read(keep - begin).rfind(b"\n")
            keep = begin if line_end < 0 else begin + line_end + 1
            if line_end >= 0:
                break
        file.truncate(keep)
