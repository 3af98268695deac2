"""The monitor `comet`: an experiment of Comet, by its library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from polyaccel.core.types import Probe
from polyaccel.errors import InvariantError
from polyaccel.observability.metrics import Monitor, StepMetrics
from polyaccel.observability.monitors.options import checked, made_folder, probe_of, required


class CometMonitor(Monitor):
    """Logs figures to an experiment, online or into an archive below the run's directory."""

    name: ClassVar[str] = "comet"
    _KINDS: ClassVar[dict[str, type]] = {
        "samples_log_interval": int,
        "project": str,
        "workspace": str,
        "api_key": str,
        "experiment_name": str,
        "experiment_key": str,
        "online": bool,
        "mode": str,
    }

    def __init__(self) -> None:
        self._experiment: Any = None
        self._interval = 1
        self._next_sample = 0

    @classmethod
    def probe(cls) -> Probe:
        return probe_of("comet_ml", "comet")

    def open(self, directory: Path, options: Mapping[str, Any]) -> None:
        """Begin an experiment, or continue `experiment_key`. Raises ConfigError."""
        given = checked(self.name, options, self._KINDS)
        library = required(self.name, "comet_ml", "comet")
        self.close()
        self._interval = given["samples_log_interval"] or 1
        self._next_sample = 0
        known = ("api_key", "workspace", "project", "experiment_key", "online", "mode")
        folder = str(made_folder(self.name, directory / "comet"))
        self._experiment = library.start(
            **{name: given[name] for name in known if given[name] is not None},
            experiment_config=library.ExperimentConfig(
                name=given["experiment_name"],
                offline_directory=folder,
                auto_output_logging=False,
                auto_metric_logging=False,  # Comet's own hook of backward() would log a loss of step 0
                log_code=False,
                log_graph=False,
            ),
        )

    def write(self, metrics: StepMetrics) -> None:
        if self._interval == 1 or metrics.samples >= self._next_sample:
            self._next_sample = metrics.samples + self._interval
            super().write(metrics)

    def write_events(self, events: Iterable[tuple[str, float, int]]) -> None:
        if self._experiment is None:
            raise InvariantError("a monitor was written to before it was opened, or after it was closed")
        for tag, value, step in events:
            self._experiment.log_metric(tag, value, step=step)

    def close(self) -> None:
        if self._experiment is not None:
            self._experiment.end()
            self._experiment = None
