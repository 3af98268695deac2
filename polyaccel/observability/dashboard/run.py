"""A run from its folder: read again and again while it grows, and given as plain values."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyaccel.errors import PolyaccelError
from polyaccel.observability.dashboard.figures import FigureTable, flattened, rounded
from polyaccel.observability.dashboard.waits import WaitTable, shown_trace
from polyaccel.observability.run_log import (
    LOG_FILE,
    METRICS_FILE,
    MOST_RANK_FILES,
    RANKS_FOLDER,
    RUN_FILE,
    TRACE_FILE,
)

MOST_STEPS = 1000
_MOST_STEPS_OF_RANKS = 8000
"""Of all ranks together."""
_MOST_LINES, _MOST_MARKS, _MOST_PICTURES = 400, 400, 6
_MOST_PICTURE_NBYTES = 1 << 19
_SAME_LINE_S = 5.0
_FACTS = ("started", "ranks", "mesh", "packages", "plugins", "config")
_OF_RANKS = ("step_time_s", "samples_per_s", "peak_memory_nbytes", "loss")
_AT_ONCE_NBYTES = 1 << 20
_TAIL_NBYTES = 64


def is_run(folder: Path) -> bool:
    """Return whether a run has written into `folder`."""
    return any((folder / file).is_file() for file in (RUN_FILE, METRICS_FILE))


def runs_in(folder: Path) -> list[Path]:
    """Return the runs directly in `folder`, the one written last first."""
    found = [each for each in folder.iterdir() if is_run(each)] if folder.is_dir() else []
    return sorted(found, key=_written_s, reverse=True)


def _written_s(folder: Path) -> float:
    files = (folder / file for file in (RUN_FILE, METRICS_FILE))
    return max(file.stat().st_mtime for file in files if file.is_file())


class WatchedRun:
    """The run in `folder`. `look` reads what is new; `revision` grows with it.

    Raises PolyaccelError where the folder has neither `run.json` nor `metrics.jsonl`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.revision = 0
        if not is_run(folder):
            raise PolyaccelError(
                f"{folder} is not a run's folder: it has neither {RUN_FILE} nor {METRICS_FILE}",
                hint='name the folder that "run_dir" of the config named',
                value=str(folder),
            )
        self._stamps: dict[str, tuple[int, int]] = {}
        self._begin()

    def _begin(self) -> None:
        self._main = FileTailer(self.folder / METRICS_FILE)
        self._others: dict[int, FileTailer] = {}
        self._logs: dict[int, FileTailer] = {}
        self._figures = FigureTable(MOST_STEPS)
        self._events = FigureTable(MOST_STEPS)
        self._by_rank: dict[int, FigureTable] = {}
        self._totals: dict[int, dict[str, float]] = {}
        self._last: dict[str, Any] = {"step": None, "figures": {}}
        self._planned: dict[str, Any] = {}
        self._experts: dict[str, list[int]] = {}
        self._marks: deque[dict[str, Any]] = deque(maxlen=_MOST_MARKS)
        self._alarms: deque[dict[str, Any]] = deque(maxlen=_MOST_LINES)
        self._lines: deque[dict[str, Any]] = deque(maxlen=_MOST_LINES)
        self._ends: dict[int, str] = {}
        self._facts: dict[str, Any] = {}
        self._pictures: dict[str, str] = {}
        self._trace: dict[str, Any] | None = None
        self._stamps.clear()
        self._waits = WaitTable(0)

    def look(self) -> bool:
        """Read what is new. Returns whether anything is."""
        changed = self._look_at_run()
        starts_over, records = self._main.news()
        if starts_over:
            self._begin()
            self._look_at_run()
            _, records = self._main.news()
        for record in records:
            self._take(record)
        changed |= starts_over or bool(records)
        for rank in self._files("*.jsonl"):
            _, records = self._others.setdefault(rank, FileTailer(self._file(rank))).news()
            for record in records:
                self._take_of_rank(rank, record)
            changed |= bool(records)
        changed |= self._look_at_logs() | self._look_at_pictures()
        if (stamp := self._new_stamp(TRACE_FILE)) is not None:
            self._trace = shown_trace(self.folder / TRACE_FILE) if stamp else None
            changed = True
        self.revision += changed
        return changed

    def _file(self, rank: int, end: str = "jsonl") -> Path:
        return self.folder / RANKS_FOLDER / f"{rank}.{end}"

    def _files(self, pattern: str) -> list[int]:
        found = (path.name.partition(".") for path in (self.folder / RANKS_FOLDER).glob(pattern))
        ranks = sorted(int(rank) for rank, _, end in found if rank.isdecimal() and "*." + end == pattern)
        return ranks[:MOST_RANK_FILES]

    def _new_stamp(self, name: str) -> tuple[int, int] | None:
        """Size and time of a file where they are others than at the last look (0 and 0: it is gone), else None."""
        try:
            stat = (self.folder / name).stat()
            stamp = stat.st_size, stat.st_mtime_ns
        except OSError:
            stamp = 0, 0
        if self._stamps.get(name, (0, 0)) == stamp:
            return None
        self._stamps[name] = stamp
        return stamp

    def _look_at_run(self) -> bool:
        if self._new_stamp(RUN_FILE) is None:
            return False
        try:
            content = json.loads((self.folder / RUN_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # half written: its stamp will change
            return False
        self._facts = {name: content[name] for name in _FACTS if name in content} if isinstance(content, dict) else {}
        ranks = self._facts.get("ranks")
        self._waits = WaitTable(ranks if isinstance(ranks, int) and ranks <= MOST_RANK_FILES else 0)
        return True

    def _take(self, record: Mapping[str, Any]) -> None:
        """A line of rank 0: a step, a figure of the user's own, or an alarm."""
        step = record.get("step")
        if not isinstance(step, int):
            return
        if "alarm" in record:
            self._alarms.append({"step": step, "text": str(record["alarm"])})
        elif "tag" in record:
            if isinstance(value := record.get("value"), (int, float)):
                self._events.add(step, {str(record["tag"]): value})
        else:
            self._planned = dict(_mapping(record, "planned_nbytes")) or self._planned
            figures = flattened(record)
            self._last = {
                "step": step,
                "figures": {name: rounded(one) for name, one in figures.items() if "/" not in name},
            }
            self._figures.add(step, figures)
            for name, what in _mapping(record, "nonfinite").items():
                self._marks.append({"step": step, "text": f"{name} was {what}"})
            if record.get("skipped"):
                self._marks.append({"step": step, "text": "update skipped: gradients were not finite"})
            for layer, content in _mapping(record, "experts").items():
                if isinstance(content, Mapping) and isinstance(content.get("tokens"), list):
                    self._experts[layer] = content["tokens"]
            self._take_of_rank(0, record)

    def _take_of_rank(self, rank: int, record: Mapping[str, Any]) -> None:
        step = record.get("step")
        if not isinstance(step, int) or "tag" in record:
            return
        figures = {name: value for name in _OF_RANKS if isinstance(value := record.get(name), (int, float))}
        waiting = _waiting(record)
        if rank not in self._by_rank:
            ranks = max(1, self._facts.get("ranks") or 1)
            self._by_rank[rank] = FigureTable(max(50, min(400, _MOST_STEPS_OF_RANKS // ranks)))
        self._by_rank[rank].add(step, figures | waiting)
        if "waited_s" in waiting:
            self._waits.add(step, rank, waiting["waited_s"])
        totals = self._totals.setdefault(rank, dict.fromkeys(("steps", "seconds", "waited_s", "sent_nbytes"), 0.0))
        totals["steps"] += 1
        totals["seconds"] += figures.get("step_time_s", 0.0)
        totals["waited_s"] += waiting.get("waited_s", 0.0)
        totals["sent_nbytes"] += waiting.get("sent_nbytes", 0.0)

    def _look_at_logs(self) -> bool:
        changed = False
        for rank in (0, *self._files(f"*.{LOG_FILE}")):
            path = self._file(rank, LOG_FILE) if rank else self.folder / LOG_FILE
            _, lines = self._logs.setdefault(rank, FileTailer(path)).news()
            for line in lines:
                self._take_line(rank, line)
            changed |= bool(lines)
        return changed

    def _take_line(self, rank: int, line: Mapping[str, Any]) -> None:
        time_s, text = line.get("time"), line.get("text")
        if not isinstance(time_s, (int, float)) or not isinstance(text, str):
            return
        level = str(line.get("level"))
        if "state" in line:
            self._ends[rank] = str(line["state"])
        for other in reversed(self._lines):
            if other["text"] == text and abs(other["time"] - time_s) < _SAME_LINE_S:
                other["ranks"] = sorted({*other["ranks"], rank})
                return
        self._lines.append({"time": time_s, "level": level, "text": text, "ranks": [rank]})

    def _look_at_pictures(self) -> bool:
        names = sorted(path.name for path in self.folder.glob("*.svg"))[:_MOST_PICTURES]
        changed = False
        for name in {*names, *self._pictures}:
            if (stamp := self._new_stamp(name)) is not None:
                self._pictures.pop(name, None)
                changed = True
                if 0 < stamp[0] <= _MOST_PICTURE_NBYTES:
                    with suppress(OSError):
                        self._pictures[name] = (self.folder / name).read_text(encoding="utf-8", errors="replace")
        return changed

    @property
    def state(self) -> str:
        """Return `failed` if any rank's log has it, else rank 0's `running` or `ended`; "" if unknown."""
        return "failed" if "failed" in self._ends.values() else self._ends.get(0, "")

    def shown(self) -> dict[str, Any]:
        """All that the page shows, ready for strict JSON."""
        totals = {
            rank: {name: rounded(value) for name, value in content.items()}
            for rank, content in sorted(self._totals.items())
        }
        return {
            "name": self.name,
            "state": self.state,
            "facts": self._facts,
            "last": self._last,
            "figures": self._figures.shown(),
            "events": self._events.shown(),
            "ranks": {rank: table.shown() for rank, table in sorted(self._by_rank.items())},
            "totals": totals,
            "waits": self._waits.shown(),
            "experts": self._experts,
            "planned": self._planned,
            "marks": list(self._marks),
            "alarms": list(self._alarms),
            "log": sorted(self._lines, key=lambda line: line["time"]),
            "trace": self._trace,
            "pictures": dict(sorted(self._pictures.items())),
            "unread": self._main.unread + sum(file.unread for file in (*self._others.values(), *self._logs.values())),
        }


def _mapping(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get(name)
    return value if isinstance(value, Mapping) else {}


def _waiting(record: Mapping[str, Any]) -> dict[str, float]:
    """What a step's collectives add up to."""
    content = [one for one in _mapping(record, "collectives").values() if isinstance(one, Mapping)]
    if not content:
        return {}
    return {name: sum(one.get(name, 0.0) for one in content) for name in ("waited_s", "sent_nbytes")}


class FileTailer:
    """The whole lines of the file `path`, as they appear. It may not be there yet.

    A last line without its end is left for the next look, what is not a JSON object is passed over and counted in
    `unread`, and a file that is another one, or another text, than at the last look is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.unread = 0
        self._path = path
        self._read_nbytes = 0
        self._tail = b""
        """The last bytes that were read, by which a file is recognised."""

    def news(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether all that was given before no longer counts, and the lines since the last look."""
        try:
            with self._path.open("rb") as file:
                starts_over = not self._is_same(file.fileno())
                if starts_over:
                    self._read_nbytes, self._tail, self.unread = 0, b"", 0
                return starts_over, self._whole_lines(file.fileno())
        except OSError:  # gone, or on its way
            starts_over, self._read_nbytes, self._tail = self._read_nbytes > 0, 0, b""
            return starts_over, []

    def _is_same(self, file: int) -> bool:
        return os.pread(file, len(self._tail), self._read_nbytes - len(self._tail)) == self._tail

    def _whole_lines(self, file: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        rest = b""
        at = self._read_nbytes
        while data := os.pread(file, _AT_ONCE_NBYTES, at):
            at += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(line, found)
        read_nbytes = at - len(rest)
        if read_nbytes > self._read_nbytes:
            length = min(_TAIL_NBYTES, read_nbytes)
            self._read_nbytes, self._tail = read_nbytes, os.pread(file, length, read_nbytes - length)
        return found

    def _take(self, line: bytes, found: list[dict[str, Any]]) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            found.append(record)
        elif line.strip():
            self.unread += 1
