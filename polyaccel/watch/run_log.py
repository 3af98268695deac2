"""The log of a rank as a file in the run's folder, for those who look at the run later or from elsewhere."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TextIO

from polyaccel.engine.console import OwnHandler
from polyaccel.engine.metrics import cut_unfinished_line

LOG_FILE = "log.jsonl"
"""In a run's folder: a JSON object a line, with `time` (seconds since 1970), `level` and `text`."""
_MOST_CHARACTERS = 4000


class RunLog(OwnHandler):
    """Appends what polyaccel's log says, from level info on (on ranks other than 0 warnings and errors only), and at
    the end how the run ended. A file that cannot be written is given up, and nobody is told twice."""

    def __init__(self, path: Path, rank: int) -> None:
        """Raises OSError."""
        super().__init__(logging.INFO if rank == 0 else logging.WARNING)
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_unfinished_line(path)
        self._file: TextIO | None = path.open("a", encoding="utf-8")
        self._rank = rank
        logging.getLogger("polyaccel").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._append(record.created, record.levelname.lower(), record.getMessage())
        except Exception:  # a full disk must not end training
            self._give_up()

    def finish(self) -> None:
        """Say how the run ended, and write no more. May be called twice."""
        if self._file is None:
            return
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)  # that which the interpreter has shown
        if error is not None and not isinstance(error, SystemExit):
            what = "was interrupted" if isinstance(error, KeyboardInterrupt) else "ended by an error"
            said = f": {type(error).__name__}: {error}" if str(error) else f": {type(error).__name__}"
            self.handle(_record(logging.ERROR, f"rank {self._rank} {what}{said}"))
        elif self._rank == 0:
            self.handle(_record(logging.INFO, "the run has ended"))
        self._give_up()

    def _append(self, time_s: float, level: str, text: str) -> None:
        if self._file is not None:
            line = {"time": round(time_s, 3), "level": level, "text": text[:_MOST_CHARACTERS]}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def _give_up(self) -> None:
        logging.getLogger("polyaccel").removeHandler(self)
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _record(level: int, text: str) -> logging.LogRecord:
    return logging.LogRecord("polyaccel.watch", level, __file__, 0, text, None, None)
