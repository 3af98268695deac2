"""The standard inputs of agents: lines go out as there is room for them.

[Note: Input of pdsh agents]
pdsh forwards no input, and every user may read arguments. So pdsh starts ssh by its module `exec`, and each ssh reads
a pipe of the launcher, which it opens by name below /proc: the kernel lets only processes of the same user do so. All
that an agent gets travels through its ssh, as under `--launcher ssh`. When the launcher ends, so does the pipe. The
shell that runs ssh prints a word after it, behind all words of the agent: where one of those is missing, it is lost.
"""

from __future__ import annotations

import os
from contextlib import suppress


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
