"""The monitor `mlflow`: the figures of each step as metrics of a run of MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from time import time
from typing import Any, ClassVar

from polyaccel.core.types import Probe
from polyaccel.errors import ConfigError, Problem
from polyaccel.observability.metrics import Monitor

_OPTIONS = ("tracking_uri", "experiment", "run_name")
_REFUSED = re.compile(r"[^\w\-. /:]")
_MOST_AT_ONCE = 1000
"""MLflow's limit of metrics in one request."""


class MlflowMonitor(Monitor):
    """Logs metrics to one run for each run folder: a folder that was used before continues in its run."""

    API_VERSION: ClassVar[tuple[int, int]] = (2, 0)
    name: ClassVar[str] = "mlflow"

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id = ""

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True, reason="comes with MLflow's client")

    def open(self, directory: Path, options: Mapping[str, Any]) -> None:
        client, experiment = self._connect(directory, options)
        self.close()
        note = directory / "mlflow_run.txt"
        if note.exists():
            self._run_id = note.read_text(encoding="utf-8").strip()
            client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = client.create_run(experiment, run_name=options.get("run_name")).info.run_id
            directory.mkdir(parents=True, exist_ok=True)
            note.write_text(self._run_id, encoding="utf-8")
        self._client = client

    def write_events(self, events: Iterable[tuple[str, float, int]]) -> None:
        from mlflow.entities import Metric

        if self._client is None:
            raise RuntimeError("a monitor is written to between open and close")
        now_ms, rows = int(time() * 1e3), iter(events)
        while some := list(islice(rows, _MOST_AT_ONCE)):
            metrics = [Metric(_REFUSED.sub("_", tag), value, now_ms, step) for tag, value, step in some]
            self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run_id)
            self._client = None

    def read(self, directory: Path, options: Mapping[str, Any]) -> Iterable[tuple[str, float | None, int]]:
        client, _ = self._connect(directory, options)
        run_id = (directory / "mlflow_run.txt").read_text(encoding="utf-8").strip()
        for tag in client.get_run(run_id).data.metrics:
            for metric in client.get_metric_history(run_id, tag):
                yield tag, metric.value, metric.step

    def _connect(self, directory: Path, options: Mapping[str, Any]) -> tuple[Any, str]:
        """The client, and the experiment's id."""
        wrong = [
            Problem(f"mlflow.{key}", value, "is not an option, or not text", f"the options are {', '.join(_OPTIONS)}")
            for key, value in options.items()
            if key not in _OPTIONS or not isinstance(value, str)
        ]
        if wrong:
            raise ConfigError(wrong)
        from mlflow import MlflowClient

        directory.mkdir(parents=True, exist_ok=True)
        server = options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
        if server is None:  # MLflow would rather have a database, for which its client alone has no library
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client = MlflowClient(server or (directory.resolve() / "mlruns").as_uri())
        name = options.get("experiment", "polyaccel")
        known = client.get_experiment_by_name(name)
        return client, client.create_experiment(name) if known is None else known.experiment_id
