"""The monitor `wandb`: a run of Weights & Biases, by its library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from polyaccel.core.types import Probe
from polyaccel.errors import InvariantError
from polyaccel.observability.metrics import Monitor
from polyaccel.observability.monitors.options import checked, made_folder, probe_of, required

_STEP = "step"


class WandbMonitor(Monitor):
    """Logs figures against `step`, a metric of the run: the library's own counter takes no step that lies before
    another, as those of events may. Each start of training is its own run; `group` holds them together."""

    name: ClassVar[str] = "wandb"
    _KINDS: ClassVar[dict[str, type]] = {"project": str, "group": str, "team": str}

    def __init__(self) -> None:
        self._run: Any = None

    @classmethod
    def probe(cls) -> Probe:
        return probe_of("wandb", "wandb")

    def open(self, directory: Path, options: Mapping[str, Any]) -> None:
        """Begin a run with files in `directory`. Raises ConfigError; errors of wandb itself are logged."""
        given = checked(self.name, options, self._KINDS)
        library = required(self.name, "wandb", "wandb")
        self.close()
        self._run = library.init(
            project=given["project"],
            group=given["group"],
            entity=given["team"],
            dir=str(made_folder(self.name, directory)),
            reinit="create_new",
            settings=library.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric=_STEP)

    def write_events(self, events: Iterable[tuple[str, float, int]]) -> None:
        if self._run is None:
            raise InvariantError("a monitor was written to before it was opened, or after it was closed")
        for step, together in groupby(events, key=lambda event: event[2]):
            self._run.log({tag: value for tag, value, _ in together} | {_STEP: step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
