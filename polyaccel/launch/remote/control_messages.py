"""What a launcher and its agents on other hosts send each other, over an agent's standard input and output.

The launcher sends lines: the job, an empty one every few seconds, signals to pass on. An agent ends its ranks when the
lines end, or stay away: then the launcher is gone, or the way to it. A launcher that is about to be stopped (Ctrl-Z)
announces it; until its next line an agent is content with none. The agent sends words among what its ranks print: that
it is there, whenever something has come of the launcher, and how its part of the job ended. A launcher that receives
nothing from an agent for so long gives its host up, unless it is its own reader that lets nothing through.

[Note: Input of pdsh agents]
pdsh forwards no input, and every user may read arguments. So pdsh starts ssh by its module `exec`, and each ssh reads
a pipe of the launcher, which it opens by name below /proc: the kernel lets only processes of the same user do so. All
that an agent gets travels through its ssh, as under `--launcher ssh`. When the launcher ends, so does the pipe. The
shell that runs ssh prints a word after it, behind all words of the agent: where one of those is missing, it is lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class AgentInput:
    """An input that the descriptor `write_fd` leads to."""

    def __init__(self, write_fd: int) -> None:
        os.set_blocking(write_fd, False)
        self._write_fd = write_fd
        self._unsent = b""

    @property
    def has_unsent(self) -> bool:
        """Whether lines wait for room."""
        return bool(self._unsent)

    def send(self, line: str) -> None:
        """Send a line now, or when there is room. Nothing arrives where the reader has gone."""
        self._unsent += line.encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        with suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._write_fd, self._unsent) :]


class AgentPipe(AgentInput):
    """An input that another process of the same user opens by its `path`. Linux only."""

    def __init__(self) -> None:
        self._read_fd, write_fd = os.pipe()
        super().__init__(write_fd)
        self.path = f"/proc/{os.getpid()}/fd/{self._read_fd}"

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)


BEAT_S = 2.0
"""How often the launcher sends a line."""
SILENCE_S = 10.0
"""An agent that has received nothing for so long ends its ranks, and one that has sent nothing for so long is given
up."""
SIGNAL, END, PAUSE = "signal", "end", "pause"
_MARK = b"\x1epolyaccel-agent "


def word(**values: Any) -> bytes:
    """A word of an agent, as it stands among its output."""
    return _MARK + json.dumps(values).encode("ascii") + b"\n"


def shell_word(**variables: str) -> str:
    """The command of a shell that prints a word, with integers of shell variables as its values."""
    values = ", ".join(f'"{name}": %d' for name in variables)
    shown = " ".join(f'"${variable}"' for variable in variables.values())
    mark = _MARK.decode().replace("\x1e", "\\036")
    return f"printf '{mark}{{{values}}}\\n' {shown}"


class MessageFilter:
    """Takes the words out of what an agent sends, and gives them to `receive`."""

    def __init__(self, receive: Callable[[dict[str, Any]], None]) -> None:
        self._receive = receive
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What is left of `data`; the beginning of what may be a word is held back until the next call."""
        text, shown = self._held + data, b""
        while True:
            before, mark, rest = text.partition(_MARK)
            shown += before
            if not mark:
                held_nbytes = next((n for n in range(len(_MARK) - 1, 0, -1) if before.endswith(_MARK[:n])), 0)
                self._held = before[len(before) - held_nbytes :]
                return shown[: len(shown) - held_nbytes]
            line, newline, text = rest.partition(b"\n")
            if not newline:
                self._held = mark + line
                return shown
            self._receive(json.loads(line))
