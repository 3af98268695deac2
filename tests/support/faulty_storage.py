"""A storage that fails on purpose, for processes that tests cannot reach into: installed by `installed_in`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

from polyaccel.checkpoint.storage.file import FileStorage
from polyaccel.errors import CheckpointError


class FaultyStorage(FileStorage):
    """A folder in which the write number `at` (from 0, in this process, of files whose path has `of` in it) does what
    `fault` says: "error before", "error after", "kill before", "kill after"; a path with `lasts` in it is never written
    while the file `until` does not exist."""

    API_VERSION = (2, 0)
    name = "faulty"
    calls: ClassVar[dict[str, int]] = {}
    lock: ClassVar[Lock] = Lock()

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> Any:
        return dict(options)

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        if "lasts" in self.options and self.options["lasts"] in path and not path.endswith("owner.json"):
            self._wait()
        fault = self.options.get("fault", "") if self._is_due(path) else ""
        if fault == "kill before":
            os._exit(9)
        if fault == "error before":
            raise CheckpointError(f"{path} cannot be written, as the test wants", hint="none")
        super().write(path, chunks)
        if fault == "kill after":
            os._exit(9)
        if fault == "error after":
            raise CheckpointError(f"{path} was written, and the test wants an error", hint="none")

    def _is_due(self, path: str) -> bool:
        if "fault" not in self.options or self.options.get("of", "") not in path or path.endswith("owner.json"):
            return False  # the last is written by rank 0 itself
        with self.lock:
            number = self.calls.get(self.location, 0)
            self.calls[self.location] = number + 1
        return bool(number == self.options["at"])

    def _wait(self) -> None:
        import time

        while not Path(self.options["until"]).exists():
            time.sleep(0.01)


def installed_in(folder: Path) -> None:
    """Make a package of this module in `folder`, which then has to be on the path of processes."""
    info = folder / "faulty_storage-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty_storage\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[polyaccel.storage]\nfaulty = faulty_storage:FaultyStorage\n")
