"""The agent of one host of a job: `python -m polyaccel.launch.remote.agent NUMBER`, which a launcher starts there.

It reports that it is there, receives the job, starts its host's ranks and stays with them as `polyaccel run` does. It
ends them when the launcher requests it, and when the launcher is silent.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from importlib import metadata
from math import inf
from time import monotonic
from typing import ClassVar

from polyaccel.errors import LaunchError, PolyaccelError
from polyaccel.job.ports import free_port
from polyaccel.launch.base import Job
from polyaccel.launch.output import JobOutput
from polyaccel.launch.plan import plan_host
from polyaccel.launch.remote.control_messages import END, PAUSE, SIGNAL, SILENCE_S, word
from polyaccel.launch.supervise import Supervisor

_OUTPUT = 1
_CHUNK_NBYTES = 1 << 16


class LauncherChannel:
    """The lines of the launcher of the agent of that `number`, read from the descriptor `read_fd`."""

    sender: ClassVar[str] = "the launcher"
    """Whose lines they are, in messages."""

    def __init__(self, read_fd: int, number: int) -> None:
        self.read_fd = read_fd
        self._number = number
        self.silent_at_s = monotonic() + SILENCE_S
        self._text = b""
        self._has_ended = False

    def job(self) -> Job | None:
        """The job, once the launcher has sent it; None if it ended before."""
        while True:
            for line in self._lines():
                if line == END or line.startswith(SIGNAL):
                    return None
                if line and line != PAUSE:
                    os.set_blocking(self.read_fd, False)
                    return Job.from_json(line)
            if self._has_ended:
                return None

    def take(self) -> tuple[list[int], str]:
        """As `ControlChannel.take` has it."""
        signals, end = list[int](), ""
        for line in self._lines():
            what, _, number = line.partition(" ")
            if what == SIGNAL:
                signals.append(int(number))
            elif what == END:
                end = f"ended by {self.sender}"
        if self._has_ended:
            end = end or f"ended: {self.sender}, or the way to it, is gone"
        elif monotonic() >= self.silent_at_s:
            end = end or f"ended: nothing was received from {self.sender} for {SILENCE_S:g} s"
        return signals, end

    @property
    def is_lost(self) -> bool:
        """Whether the sender of lines is gone."""
        return self._has_ended or monotonic() >= self.silent_at_s

    def report(self, code: int, sentence: str) -> None:
        """As `ControlChannel.report` has it."""
        _say(number=self._number, code=code, why=sentence)

    def conclude(self, code: int) -> None:
        """This part of the job has ended."""
        _say(number=self._number, ended=code)

    def _answer(self) -> None:
        """Send a sign of life. Nothing is sent where the output is full: then its reader is late."""
        if select.select([], [_OUTPUT], [], 0)[1]:
            _say(number=self._number, alive=True)

    def _lines(self) -> list[str]:
        try:
            data = os.read(self.read_fd, _CHUNK_NBYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self._has_ended = not data
        if data:
            self.silent_at_s = monotonic() + SILENCE_S
            self._answer()
        *lines, self._text = (self._text + data).split(b"\n")
        if lines and lines[-1] == PAUSE.encode():
            self.silent_at_s = inf
        return [line.decode() for line in lines]


def main(number: int) -> int:
    """Do this host's part of a job. Returns its exit code."""
    control = os.dup(0)
    os.set_inheritable(control, False)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # no rank reads what is for this process
    host = socket.gethostname()
    _say(number=number, host=host, version=metadata.version("polyaccel"), python=sys.version, port=free_port())
    orders = LauncherChannel(control, number)
    job = orders.job()
    if job is None:
        return 1
    try:
        os.chdir(job.folder)
        plan = plan_host(job, number)
        code = Supervisor(plan, JobOutput(plan, name=f"polyaccel on {host}"), orders=orders).run().code
    except (PolyaccelError, OSError) as error:
        shown = error if isinstance(error, PolyaccelError) else LaunchError(f"host {host}: {error}")
        orders.report(1, str(shown))
        code = 1
    orders.conclude(code)
    return code


def _say(**values: object) -> None:
    try:
        os.write(_OUTPUT, word(**values))
    except OSError:
        return  # it has no reader


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
