"""The monitor `csv`: a file for each figure, for spreadsheets and for scripts."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TextIO

from polyaccel.errors import InvariantError
from polyaccel.observability.metrics import Monitor, cut_unfinished_line
from polyaccel.observability.monitors.options import checked, output_folder

_NO_NAME = re.compile(r"[^A-Za-z0-9.-]+")


class CsvMonitor(Monitor):
    """Appends `step,value` to a file for each tag, whose first line is `step,TAG`. Files are called like their tags,
    with `_` for what is not a name of a file; a resumed run continues in the same ones."""

    name: ClassVar[str] = "csv"
    _KINDS: ClassVar[dict[str, type]] = {"output_path": str, "job_name": str}

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._paths: dict[str, Path] = {}
        self._files: dict[str, TextIO] = {}

    def open(self, directory: Path, options: Mapping[str, Any]) -> None:
        """Open the folder's files and cut off half-written last lines. Raises ConfigError."""
        self.close()
        self._folder = output_folder(self.name, directory, checked(self.name, options, self._KINDS))
        self._paths = {tag: path for path in sorted(self._folder.glob("*.csv")) if (tag := _tag_of(path)) is not None}
        for path in self._paths.values():
            cut_unfinished_line(path)

    def write_events(self, events: Iterable[tuple[str, float, int]]) -> None:
        for tag, value, step in events:
            file = self._files.get(tag) or self._begin(tag)
            file.write(f"{step},{float(value)!r}\n")
            file.flush()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()
        self._folder = None

    def read(self, directory: Path, options: Mapping[str, Any]) -> Iterable[tuple[str, float | None, int]]:
        folder = output_folder(self.name, directory, checked(self.name, options, self._KINDS))
        for path in sorted(folder.glob("*.csv")):
            with path.open(encoding="utf-8", newline="") as file:
                (_, tag), *rows = csv.reader(file)
            for step, value in rows:
                yield tag, float(value), int(step)

    def _begin(self, tag: str) -> TextIO:
        """The open file of `tag`, with its first line."""
        if self._folder is None:
            raise InvariantError("a monitor was written to before it was opened, or after it was closed", value=tag)
        path = self._paths.get(tag)
        if path is None:
            name, taken = _NO_NAME.sub("_", tag).lstrip(".") or "_", set(self._paths.values())
            names = (name, *(f"{name}-{count}" for count in range(2, len(taken) + 3)))
            path = next(here for each in names if (here := self._folder / f"{each}.csv") not in taken)
            with path.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(("step", tag))
            self._paths[tag] = path
        self._files[tag] = path.open("a", encoding="utf-8", newline="")
        return self._files[tag]


def _tag_of(path: Path) -> str | None:
    """The tag in the first line of a file that this monitor has begun; None of any other."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        head = next(csv.reader(file), [])
    return head[1] if len(head) == 2 and head[0] == "step" else None
