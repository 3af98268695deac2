"""The log on the console of a script that has not configured logging: without a handler no line would be shown."""

from __future__ import annotations

import logging
import os
import sys

from polyaccel.errors import ConfigError, Problem

VARIABLE = "POLYACCEL_LOG"
_LEVELS = ("debug", "info", "warning", "error", "critical")
_OFF = "off"


def show_log(rank: int, level: str | None) -> None:
    """Show polyaccel's log on stderr: rank 0 from `level` on (a name like "debug"; None: info), the other ranks
    warnings and errors only.

    An application that has a handler on the root logger or on `polyaccel`, now or later, shows what it wants: nothing
    is added to its output, and only a `level` that is given is set. The environment variable POLYACCEL_LOG goes before
    `level`, on every rank; `off` adds no handler. Raises ConfigError when it is not a level.
    """
    logger = logging.getLogger("polyaccel")
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if wanted and wanted not in (*_LEVELS, _OFF):
        raise ConfigError([Problem(VARIABLE, wanted, f"should be one of {', '.join((*_LEVELS, _OFF))}", "unset it")])
    stated = level if wanted in ("", _OFF) else wanted
    if wanted == _OFF or _others_listen(logger):
        if stated is not None:
            logger.setLevel(stated.upper())
        return
    handler = next((each for each in logger.handlers if isinstance(each, ConsoleHandler)), None)
    if handler is None:
        handler = ConsoleHandler(rank)
        logger.addHandler(handler)
    handler.rank = min(rank, handler.rank)  # ranks may be threads of one process
    handler.setLevel(logging.WARNING if handler.rank != 0 and not wanted else logging.NOTSET)
    if stated is not None:
        logger.setLevel(stated.upper())
    elif logger.level == logging.NOTSET:  # otherwise a level was chosen
        logger.setLevel(logging.INFO)


class OwnHandler(logging.Handler):
    """polyaccel's own handler: in addition to others of its kind, the console continues to show lines."""


class ConsoleHandler(OwnHandler):
    """Writes `[polyaccel] message` to stderr, and nothing as soon as a handler of the application's would too."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def format(self, record: logging.LogRecord) -> str:
        origin = "polyaccel" if self.rank == 0 else f"polyaccel, rank {self.rank}"
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"[{origin}] {level}{super().format(record)}"

    def emit(self, record: logging.LogRecord) -> None:
        if _others_listen(logging.getLogger("polyaccel")):
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # a closed stderr must not end training
            self.handleError(record)


def _others_listen(logger: logging.Logger) -> bool:
    """Whether a handler that is not ours would see the records of `logger`."""
    asked: logging.Logger | None = logger
    while asked is not None:
        if any(not isinstance(handler, OwnHandler) for handler in asked.handlers):
            return True
        asked = asked.parent if asked.propagate else None
    return False
