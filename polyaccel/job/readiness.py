"""Readiness and progress reports from a rank to its launcher over an inherited pipe.

So the launcher sees that a rank which has ended with code 0 will be waited for in vain, and need not let the others
find that out by their time limit; and it sees which rank makes no progress. The words go through a pipe of the
launcher's, whose number and identity stand in POLYACCEL_READY_FD; a process that has inherited the variable without the
pipe writes nothing.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress

READY_FD_VARIABLE = "POLYACCEL_READY_FD"
WAITS, JOINED, STEP, FAILS = "waits", "met", "step", "fails"
SHOW_STACK = getattr(signal, "SIGUSR2", signal.SIGTERM)
"""The signal at which a rank that has written to the pipe shows what its main thread does."""
_MOST_NBYTES = 1 << 16


class ReadinessPipe:
    """The launcher's end. Ranks inherit `write_fd`, and find `name` in the variable."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.name = f"{self.write_fd}:{os.fstat(self.write_fd).st_ino}"

    def poll(self) -> list[tuple[int, str]]:
        """Return what ranks have written since the last call, in order: (rank, word). Never blocks."""
        try:
            lines = os.read(self.read_fd, _MOST_NBYTES).decode(errors="replace").splitlines()
        except BlockingIOError:
            return []
        said = (line.partition(" ") for line in lines)
        return [(int(rank), word) for rank, _, word in said if rank.isdecimal()]

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)


def report_to_launcher(environ: Mapping[str, str], rank: int, word: str) -> None:
    """Write `word` for this rank, if polyaccel's launcher reads it."""
    number, _, identity = environ.get(READY_FD_VARIABLE, "").partition(":")
    if number.isdecimal() and identity.isdecimal():
        with suppress(OSError):  # this process has no pipe, or it is no longer read
            if os.fstat(int(number)).st_ino == int(identity):
                os.write(int(number), f"{rank} {word}\n".encode())


def enable_stack_dump_signal() -> None:
    """Dump the Python stack at SHOW_STACK, also inside libraries, unless the script handles it."""
    with suppress(ValueError, OSError, AttributeError):  # standard error is not a file, or the signal is missing
        if signal.getsignal(SHOW_STACK) is signal.SIG_DFL:
            faulthandler.register(SHOW_STACK, file=sys.stderr, all_threads=False, chain=False)
