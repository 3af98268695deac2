"""The log of a rank as a file in the run's folder, for those who look at the run later or from elsewhere."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TextIO

from polyaccel.observability.console import OwnHandler
from polyaccel.observability.metrics import cut_unfinished_line

RUN_FILE = "run.json"
"""The `run_metadata`, the number of ranks, and when the run was last started."""
METRICS_FILE = "metrics.jsonl"
"""Rank 0's steps, figures of the user's own, alarms."""
RANKS_FOLDER = "ranks"
"""Below it: `N.jsonl` with the steps of rank N, from 1 on, and `N.log.jsonl` with its warnings and errors."""
MOST_RANK_FILES = 256
"""Ranks that write their own files: more than a user looks at, and few enough for a file server."""
LOG_FILE = "log.jsonl"
"""A JSON object a line, with `time` (seconds since 1970), `level` and `text`; `state` where the run has begun
("running") and at its end ("ended", "failed")."""
TRACE_FILE = "trace.json"
REPORT_FILE = "report.html"
"""The page of the run, frozen at its end."""


_MOST_CHARACTERS = 4000


class RunLog(OwnHandler):
    """Appends polyaccel's log, from level info on (on ranks other than 0 warnings and errors only), and when the run
    began and how it ended. A file that cannot be written is given up, and that is logged once."""

    def __init__(self, path: Path, rank: int) -> None:
        """Raises OSError."""
        super().__init__(logging.INFO if rank == 0 else logging.WARNING)
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_unfinished_line(path)
        self._file: TextIO | None = path.open("a", encoding="utf-8")
        self._rank = rank
        self.handle(_record(logging.INFO, "the run has begun", "running"))
        logging.getLogger("polyaccel").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._append(record)
        except Exception:  # a full disk must not end training
            self._give_up()

    def finish(self) -> None:
        """Write how the run ended, and write no more. May be called twice."""
        if self._file is None:
            return
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)  # that which the interpreter has shown
        if error is not None and not isinstance(error, SystemExit):
            what = "was interrupted" if isinstance(error, KeyboardInterrupt) else "ended by an error"
            said = f": {type(error).__name__}: {error}" if str(error) else f": {type(error).__name__}"
            self.handle(_record(logging.ERROR, f"rank {self._rank} {what}{said}", "failed"))
        else:
            self.handle(_record(logging.INFO, "the run has ended", "ended"))
        self._give_up()

    def _append(self, record: logging.LogRecord) -> None:
        if self._file is None:
            return
        line: dict[str, object] = {"time": round(record.created, 3), "level": record.levelname.lower()}
        line["text"] = record.getMessage()[:_MOST_CHARACTERS]
        if state := getattr(record, "state_of_run", ""):
            line["state"] = state
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _give_up(self) -> None:
        logging.getLogger("polyaccel").removeHandler(self)
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _record(level: int, text: str, state: str) -> logging.LogRecord:
    record = logging.LogRecord("polyaccel.observability", level, __file__, 0, text, None, None)
    record.state_of_run = state
    return record
