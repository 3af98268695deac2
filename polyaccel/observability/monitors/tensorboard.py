"""The monitor `tensorboard`: event files, by TensorBoard's own writer, which needs neither torch nor TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from time import time
from typing import Any, ClassVar

from polyaccel.core.types import Probe
from polyaccel.errors import InvariantError
from polyaccel.observability.metrics import Monitor
from polyaccel.observability.monitors.options import checked, output_folder, probe_of, required

_WRITER = "tensorboard.summary.writer.event_file_writer"
_READER = "tensorboard.backend.event_processing.event_accumulator"
_FLUSH_S = 5


class TensorBoardMonitor(Monitor):
    """Writes scalars under their tags. Each start of a run adds a file, which TensorBoard shows as one curve."""

    name: ClassVar[str] = "tensorboard"
    _KINDS: ClassVar[dict[str, type]] = {"output_path": str, "job_name": str}

    def __init__(self) -> None:
        self._writer: Any = None
        self._protos: Any = None

    @classmethod
    def probe(cls) -> Probe:
        return probe_of("tensorboard", "tensorboard")

    def open(self, directory: Path, options: Mapping[str, Any]) -> None:
        """Begin a file. Raises ConfigError for options, a missing library, or the folder."""
        given = checked(self.name, options, self._KINDS)
        writing = required(self.name, _WRITER, self.name)
        self._protos = required(self.name, "tensorboard.compat.proto.event_pb2", self.name)
        self._summaries = required(self.name, "tensorboard.compat.proto.summary_pb2", self.name)
        self.close()
        self._writer = writing.EventFileWriter(str(output_folder(self.name, directory, given)), flush_secs=_FLUSH_S)

    def write_events(self, events: Iterable[tuple[str, float, int]]) -> None:
        if self._writer is None:
            raise InvariantError("a monitor was written to before it was opened, or after it was closed")
        for tag, value, step in events:
            scalar = self._summaries.Summary.Value(tag=tag, simple_value=value)
            summary = self._summaries.Summary(value=[scalar])
            self._writer.add_event(self._protos.Event(wall_time=time(), step=step, summary=summary))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def read(self, directory: Path, options: Mapping[str, Any]) -> Iterable[tuple[str, float | None, int]]:
        given = checked(self.name, options, self._KINDS)
        reading = required(self.name, _READER, self.name)
        found = reading.EventAccumulator(str(output_folder(self.name, directory, given)), {"scalars": 0})
        found.Reload()
        for tag in found.Tags()["scalars"]:
            for event in found.Scalars(tag):
                yield tag, event.value, event.step
