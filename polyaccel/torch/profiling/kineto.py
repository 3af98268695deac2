"""torch's own profiler (kineto) for the steps of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time
from typing import Any

import torch

_MARK = "polyaccel clock"


class KinetoProfiler:
    """Records operators and, on a device, its kernels. One at a time in a process."""

    framework = "torch"

    def __init__(self) -> None:
        self._profile: Any = None
        self._marked_s = 0.0

    def start(self) -> None:
        """Begin. Raises RuntimeError where another profiler of torch is at work."""
        activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()
        for _ in range(2):  # the first one takes long
            with torch.profiler.record_function(_MARK):
                self._marked_s = time()

    def stop(self) -> tuple[list[dict[str, Any]], float]:
        """End. Returns Chrome's trace events, and what is to be added to their times to have this rank's wall clock, in
        microseconds."""
        profile, self._profile = self._profile, None
        profile.stop()
        with TemporaryDirectory(prefix="polyaccel-trace-") as folder:
            path = Path(folder, "trace.json")
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        marks = [event["ts"] for event in events if event.get("name") == _MARK and event["ph"] == "X"]
        shift_us = self._marked_s * 1e6 - max(marks) if marks else 0.0
        return [event for event in events if event.get("name") != _MARK], shift_us
