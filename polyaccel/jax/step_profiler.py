"""JAX's own profiler for the steps of a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time
from typing import Any

import jax

_MARK = "polyaccel clock"


class JaxStepProfiler:
    """Records XLA's operations and JAX's calls. One at a time in a process."""

    framework = "jax"

    def __init__(self) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        self._marked_s = 0.0

    def start(self) -> None:
        """Begin. Raises RuntimeError where another profile of JAX is being made."""
        folder = TemporaryDirectory(prefix="polyaccel-trace-")
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python would be in it
        jax.profiler.start_trace(folder.name, profiler_options=options)
        self._folder = folder
        for _ in range(2):  # the first one takes long
            with jax.profiler.TraceAnnotation(_MARK):
                self._marked_s = time()

    def stop(self) -> tuple[list[dict[str, Any]], float]:
        """End; return Chrome's trace events and the shift to this rank's wall clock in microseconds."""
        assert self._folder is not None  # it was begun
        jax.profiler.stop_trace()
        with self._folder as folder:
            (path,) = Path(folder).rglob("*.trace.json.gz")
            events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        self._folder = None
        marks = [event["ts"] for event in events if event.get("name") == _MARK]
        shift_us = self._marked_s * 1e6 - max(marks) if marks else 0.0
        return [event for event in events if event.get("name") != _MARK], shift_us
