"""Tracebacks in the output of ranks: the first failing rank's in full, one line for each other rank.

Start at `TracebackFold`. It knows lines and no processes: `JobOutput` feeds it, the supervisor finds who failed first.

[Note: Order of failures]
A rank whose peer failed raises too, and which pipe is read first is chance. So a traceback is held until the first
failing rank is known: by the word FAILS that polyaccel's exception hook writes before peers can notice, else by the
first exit. A rank that prints a caught exception lives on: its next line, or HOLD_S, shows what was held.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from time import monotonic

HOLD_S = 10.0
_QUIET_S = 1.0
_RECENT_LINES = 4
_RANK = re.compile(rb"\[rank\d+\]: ?")  # torch's, on each line of a traceback
_RANK_BEGUN = re.compile(rb"\[rank\d*\]?:? ?")
_BEGIN = re.compile(rb"(?:  \+ )?(?:Exception Group )?Traceback \(most recent call last\):")
_FIRST = b"Traceback (most recent call last):"
_LINKS = (b"During handling of the above exception", b"The above exception was the direct cause")


class TracebackFold:
    """One rank's standard error. `feed` shows what is certain; `settle` decides on tracebacks, held and to come."""

    def __init__(self, show: Callable[[bytes], None]) -> None:
        self._show = show
        self._partial = b""
        self._held: list[bytes] = []
        self._since_s = self._fed_s = monotonic()
        self._recent: deque[bytes] = deque(maxlen=_RECENT_LINES)
        self._is_in_full: bool | None = None
        self.folded = 0
        """Tracebacks of which one line or none was shown."""

    @property
    def is_holding(self) -> bool:
        return bool(self._held or self._partial)

    def feed(self, data: bytes) -> None:
        """Take bytes as they come."""
        self._fed_s = monotonic()
        data, self._partial = self._partial + data, b""
        shown = []
        for line in data.splitlines(keepends=True):
            if not line.endswith((b"\n", b"\r")):
                if self._held or self._may_begin(line):
                    self._partial = line
                else:
                    shown.append(line)
            elif self._held and self._continues(line):
                self._held.append(line)
            else:
                shown += self._released()
                if self._is_in_full is not True and _BEGIN.match(_bare(line)):
                    self._held, self._since_s = [line], monotonic()
                else:
                    shown.append(line)
                    self._recent.append(line)
        self._show(b"".join(shown))

    def settle(self, *, is_in_full: bool) -> None:
        """Show tracebacks of this rank in full, or one line of each, from now on."""
        self._is_in_full = is_in_full
        if is_in_full:
            self.flush()

    def look(self) -> None:
        """Show what was held for long enough."""
        is_undecided = bool(self._held) and self._is_in_full is None
        limit_s = self._since_s + HOLD_S if is_undecided else self._fed_s + _QUIET_S
        if monotonic() >= limit_s:
            self.flush()

    def flush(self) -> None:
        """Show all that is held, as far as it is decided, else in full."""
        if not self._held:
            held, self._partial = self._partial, b""
            self._show(held)
            return
        if self._partial:
            self._held.append(self._partial)
            self._partial = b""
        self._show(b"".join(self._released()))

    def _may_begin(self, line: bytes) -> bool:
        """Whether an unfinished line may become the first one of a traceback."""
        is_prefix = b"[rank".startswith(line) or _RANK_BEGUN.fullmatch(line) is not None
        return self._is_in_full is not True and (is_prefix or _FIRST.startswith(_bare(line)))

    def _continues(self, line: bytes) -> bool:
        """Whether `line` belongs to the held traceback, or to one that is chained to it."""
        bare = _bare(line)
        if not bare.strip() or bare[:1].isspace() or bare.startswith(_LINKS):
            return True
        if _BEGIN.match(bare):
            last = next(each for each in reversed(self._held) if _bare(each).strip())
            return _bare(last).startswith(_LINKS)
        return _exception_of(self._held) is None  # which comes once

    def _released(self) -> list[bytes]:
        held, self._held = self._held, []
        line = _exception_of(held)
        if self._is_in_full is not False or line is None:  # cut off: it is shown as far as it came
            return held
        self.folded += 1
        message = line.partition(b": ")[2].strip()
        is_known = message and any(message in each for each in self._recent)
        return [] if is_known else [line]


def exception_lines(text: str) -> list[str]:
    """The lines of `text`, from the exception on where it ends with a traceback."""
    lines = text.splitlines()
    begin = next((i for i in reversed(range(len(lines))) if _BEGIN.match(_bare(lines[i].encode()))), None)
    if begin is None:
        return lines
    end = next((i for i in range(begin + 1, len(lines)) if _is_exception(lines[i].encode())), None)
    return lines if end is None else lines[end:]


def _bare(line: bytes) -> bytes:
    return _RANK.sub(b"", line, count=1) if line.startswith(b"[rank") else line


def _is_exception(line: bytes) -> bool:
    bare = _bare(line)
    return bool(bare.strip()) and not bare[:1].isspace() and not bare.startswith(_LINKS) and not _BEGIN.match(bare)


def _exception_of(held: list[bytes]) -> bytes | None:
    """The line of the last exception of a traceback; None where it was cut off before."""
    begin = next((i for i in reversed(range(len(held))) if _BEGIN.match(_bare(held[i]))), 0)
    found = next((_bare(line) for line in held[begin:] if _is_exception(line)), None)
    return None if found is None else found.rstrip(b"\r\n") + b"\n"
