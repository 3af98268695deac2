"""Files of JSON lines, followed while another process writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_AT_ONCE_NBYTES = 1 << 20
_TAIL_NBYTES = 64


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
