"""Lines of several writers on one descriptor: each line has its writer's name, and no line is torn by another writer's.

Bytes stay as they are. A line ends with a newline or, as progress bars redraw theirs, with a carriage return; the
prefix stands again after either. A line that its writer leaves unfinished, for example a question, is shown as far as
it goes; if another writer writes then, the unfinished line is closed first, and its rest gets the prefix once more.
"""

from __future__ import annotations

import os
import re
import select
from math import inf
from time import monotonic

MAX_LINE_NBYTES = 1 << 20
"""A longer line is shown in pieces."""

_WAITS_S = 1.0

# Behind a newline, and behind a carriage return once it is certain that no newline follows.
_BREAK = re.compile(rb"(?<=\n)|(?<=\r)(?=[^\n])")


class LineSink:
    """A file descriptor that several `LineWriter`s share. Bytes are dropped once its reader has gone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._writer: object = None
        self._last = b"\n"
        self._is_gone = False
        self._began_s: float | None = None
        self._waited_s = -inf

    @property
    def waited_s(self) -> float:
        """When a write last waited for the reader, for a second or more: now, while one does; `monotonic`."""
        began_s = self._began_s
        return self._waited_s if began_s is None or monotonic() - began_s < _WAITS_S else monotonic()

    def column(self, writer: object) -> bytes:
        """The last byte that was written, if `writer` wrote it, which shows whether its line is unfinished. Else a
        newline."""
        return self._last if writer is self._writer else b"\n"

    def write(self, writer: object, data: bytes) -> None:
        """Write `data` in one piece, on a new line if another writer's is open. Blocks as long as the reader does."""
        if not data:
            return
        if writer is not self._writer and self._last != b"\n":
            data = b"\n" + data
        self._writer, self._last = writer, data[-1:]
        self._began_s = began_s = monotonic()
        while data and not self._is_gone:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # the giver of the descriptor made it non-blocking
                select.select([], [self._fd], [])
            except OSError:
                self._is_gone = True
        ended_s, self._began_s = monotonic(), None
        if ended_s - began_s >= _WAITS_S:
            self._waited_s = ended_s


class LineWriter:
    """One writer: `feed` takes bytes as they come, `flush` shows the unfinished line too."""

    def __init__(self, sink: LineSink, prefix: bytes) -> None:
        self._sink = sink
        self._prefix = prefix
        self._unfinished = b""

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def feed(self, data: bytes) -> None:
        *lines, self._unfinished = _BREAK.split(self._unfinished + data)
        self._write(lines)
        if len(self._unfinished) > MAX_LINE_NBYTES:
            self.flush()

    def flush(self) -> None:
        lines, self._unfinished = [self._unfinished], b""
        self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        before = self._sink.column(self)
        dressed = []
        for line in lines:
            is_rest = before not in b"\r\n" or (before == b"\r" and line == b"\n")
            dressed.append(line if is_rest or line == b"\r" else self._prefix + line if line else line)
            before = line[-1:] or before
        self._sink.write(self, b"".join(dressed))
