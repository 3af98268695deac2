"""Lines of several writers on one file descriptor, each with its prefix: `LineSink` and `LineWriter`. No processes.

[Note: Progress bars]
A bar redraws its line: a carriage return, then text over the text before. A terminal shows it as it comes, with the
prefix behind each carriage return. Everywhere else a line shows what a terminal would show last, and a long bar shows
its newest state every REDRAW_S. The same holds on a terminal for a writer while another one's line is open,
because two bars would push each other down.

Nested bars of tqdm go down by newlines, draw, and go up by escapes. A newline next to an escape that goes up ends no
line. Where a bar's state is shown with a newline that its rank did not write, the writer remembers one such escape.
"""

from __future__ import annotations

import os
import re
import select
from math import inf
from time import monotonic

MAX_LINE_NBYTES = 1 << 20
"""A longer line is shown in pieces."""

REDRAW_S = 10.0
"""Time between two states of one progress bar where no terminal redraws it."""

_WAITS_S = 1.0

# Behind a newline, and behind a carriage return once it is certain that no newline follows.
_BREAK = re.compile(rb"(?<=\n)|(?<=\r)(?=[^\n])")
_UP = b"\x1b[A"
_END = re.compile(rb"(?<=\n)")
_MOVE = re.compile(rb"(\r|\x1b\[A)")
_UPS = re.compile(rb"(?:\x1b\[A)+\Z")
_INVISIBLE = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]|\s")


class LineSink:
    """A file descriptor that several `LineWriter`s share. Bytes are dropped once its reader has gone.

    `redraws` is for terminals: a writer's carriage returns reach them, unless another one's line is open.
    """

    def __init__(self, fd: int, *, redraws: bool = False) -> None:
        self._fd = fd
        self.redraws = redraws
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
        """Return the last byte that `writer` wrote, which shows an unfinished line, else a newline."""
        return self._last if writer is self._writer else b"\n"

    def may_redraw(self, writer: object) -> bool:
        """Return whether carriage returns of `writer` redraw its own line now."""
        return self.redraws and (writer is self._writer or self._last == b"\n")

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
    """One writer: `feed` takes bytes as they come, `look` and `flush` show the unfinished line too.

    See [Note: Progress bars].
    """

    def __init__(self, sink: LineSink, prefix: bytes) -> None:
        self._sink = sink
        self._prefix = prefix
        self._unfinished = b""
        self._held_s = monotonic()

    @property
    def has_unfinished(self) -> bool:
        return bool(_MOVE.sub(b"", self._unfinished))

    def feed(self, data: bytes) -> None:
        text = self._unfinished + data
        if self._sink.may_redraw(self):
            *lines, self._unfinished = _BREAK.split(text)
            self._write(lines)
        else:
            was_bar = _is_bar(self._unfinished)
            while _UP + b"\n" in text:
                text = text.replace(_UP + b"\n", b"")
            *lines, rest = _END.split(text)
            self._unfinished = _without_old_states(rest)
            self._write_states(lines)
            if lines or not was_bar:
                self._held_s = monotonic()
            if _is_bar(self._unfinished):
                self.look()
        if len(self._unfinished) > MAX_LINE_NBYTES:
            self.flush()

    def look(self) -> None:
        """Show the unfinished line, but a progress bar only once in REDRAW_S where no terminal redraws it."""
        is_due = monotonic() - self._held_s >= REDRAW_S
        if is_due or self._sink.may_redraw(self) or not _is_bar(self._unfinished):
            self.flush()

    def flush(self) -> None:
        """Show the unfinished line."""
        line, self._unfinished = self._unfinished, b""
        if self._sink.may_redraw(self) or not _is_bar(line):
            self._write(_BREAK.split(line))
        elif _MOVE.sub(b"", line):
            ups = _UPS.search(line)
            self._unfinished = b"" if self._sink.redraws else _UP + (ups[0] if ups else b"")
            self._write_states([line if self._sink.redraws else line + b"\n"])
            self._held_s = monotonic()

    def _write_states(self, lines: list[bytes]) -> None:
        """Write of each line what a terminal would show last."""
        ended: list[bytes] = []
        for line in lines:
            state, is_redrawn = _last_state(line)
            if is_redrawn and not ended and self._sink.column(self) != b"\n":
                ended.append(b"\n")
            ended.append(state)
        self._write(ended)

    def _write(self, lines: list[bytes]) -> None:
        before = self._sink.column(self)
        dressed = []
        for line in lines:
            is_rest = before not in b"\r\n" or (before == b"\r" and line == b"\n")
            dressed.append(line if is_rest or line == b"\r" else self._prefix + line if line else line)
            before = line[-1:] or before
        self._sink.write(self, b"".join(dressed))


def _is_bar(line: bytes) -> bool:
    return _MOVE.search(line) is not None


def _states(line: bytes) -> tuple[list[bytes], int | None]:
    """Return the texts of a line and the moves between them, in turn, and the place of the last visible text."""
    parts = _MOVE.split(line)
    places = [place for place in range(0, len(parts), 2) if _INVISIBLE.sub(b"", parts[place])]
    return parts, places[-1] if places else None


def _without_old_states(line: bytes) -> bytes:
    """Return an unfinished line without the texts that later ones replace."""
    if not _is_bar(line.removesuffix(b"\r")):
        return line
    parts, place = _states(line)
    moves = parts[1::2] if place is None else parts[place + 1 :: 2]
    state = b"" if place is None else b"\r" * (place > 0) + parts[place]
    if parts[-1] and moves:  # not visible so far
        return state + b"\r" + parts[-1]
    ups = _UPS.search(line)
    return state + b"\r" * (b"\r" in moves) + (ups[0] if ups else b"")


def _last_state(line: bytes) -> tuple[bytes, bool]:
    """Return what a terminal shows of a line in the end, and whether that replaces a text before it."""
    text = line.removesuffix(b"\n")
    if not _is_bar(text):
        return line, False
    parts, place = _states(text)
    state, newline = b"" if place is None else parts[place], line[len(text) :]
    if place:
        return state + newline, True
    return state + b"\r" * text.endswith(b"\r") + newline, False
