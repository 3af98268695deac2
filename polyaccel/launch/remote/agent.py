"""The agent of one host of a job: `python -m polyaccel.launch.remote.agent NUMBER`, which a launcher starts there, or
`... agent NUMBERS PLACE PORT`, the one at that place of the list, which calls its launcher back at the port.

It says that it is there, is told the job, starts its host's ranks and stays with them as `polyaccel run` does. It ends
them when the launcher says so, and when that is not heard of any more.
"""

from __future__ import annotations

import os
import secrets
import select
import selectors
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from math import inf
from time import monotonic
from typing import ClassVar

from polyaccel.errors import LaunchError, PolyaccelError
from polyaccel.launch.base import Job
from polyaccel.launch.output import JobOutput
from polyaccel.launch.plan import plan_host
from polyaccel.launch.remote.callback_server import KEY_NBYTES, LOST, EncryptedStream, call_back
from polyaccel.launch.remote.control_messages import END, PAUSE, SIGNAL, SILENCE_S, word
from polyaccel.launch.supervise import Supervisor
from polyaccel.ports import free_port

_OUTPUT = 1
_CHUNK_NBYTES = 1 << 16
_LAST_WORD_S = 5.0


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
                    self._never_wait()
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
            end = end or f"ended: nothing was heard of {self.sender} for {SILENCE_S:g} s"
        return signals, end

    @property
    def is_lost(self) -> bool:
        """Whether nobody is there any more who would send lines."""
        return self._has_ended or monotonic() >= self.silent_at_s

    def report(self, code: int, sentence: str) -> None:
        """As `ControlChannel.report` has it."""
        _say(number=self._number, code=code, why=sentence)

    def conclude(self, code: int) -> None:
        """This part of the job has ended."""
        _say(number=self._number, ended=code)

    def _never_wait(self) -> None:
        os.set_blocking(self.read_fd, False)

    def _read(self) -> bytes:
        """What has come; nothing where the launcher has ended. Raises BlockingIOError, and OSError."""
        return os.read(self.read_fd, _CHUNK_NBYTES)

    def _answer(self) -> None:
        """Say that somebody is there. Nothing is said where the output is full: then its reader is known to be late."""
        if select.select([], [_OUTPUT], [], 0)[1]:
            _say(number=self._number, alive=True)

    def _lines(self) -> list[str]:
        try:
            data = self._read()
        except BlockingIOError:
            return []
        except (OSError, ValueError):
            data = b""
        self._has_ended = not data
        if data:
            self.silent_at_s = monotonic() + SILENCE_S
            self._answer()
        *lines, self._text = (self._text + data).split(b"\n")
        if lines and lines[-1] == PAUSE.encode():
            self.silent_at_s = inf
        return [line.decode() for line in lines]


class CalledOrders(LauncherChannel):
    """The lines of a launcher that the agent has called back. It ends with the connection, or with the standard input,
    which is the way by which the agent was started."""

    def __init__(self, connection: socket.socket, records: EncryptedStream, way_fd: int, number: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._selector.register(way_fd, selectors.EVENT_READ)
        super().__init__(self._selector.fileno(), number)
        self._connection = connection
        self._records = records
        self._way_fd = way_fd
        self._waits = True
        self._has_lost_way = False

    def conclude(self, code: int) -> None:
        with suppress(OSError):
            self._connection.settimeout(_LAST_WORD_S)
            self._connection.sendall(self._records.last_word(LOST if self._has_lost_way else code))
        super().conclude(code)

    def _never_wait(self) -> None:
        self._waits = False

    def _read(self) -> bytes:
        ready = {key.fd for key, _ in self._selector.select(None if self._waits else 0)}
        if self._way_fd in ready and not os.read(self._way_fd, _CHUNK_NBYTES):
            self._has_lost_way = True
            return b""
        if self._connection.fileno() not in ready:
            raise BlockingIOError
        data = self._connection.recv(_CHUNK_NBYTES)
        if not data:
            return b""
        text = self._records.opened(data)
        if not text:
            raise BlockingIOError
        return text


def main(number: int, port: int | None = None) -> int:
    """Do this host's part of a job; `port` is that of a launcher to call back. Returns its exit code."""
    control = os.dup(0)
    os.set_inheritable(control, False)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # no rank reads what is for this process
    host = socket.gethostname()
    facts: dict[str, object] = {"number": number, "host": host, "version": metadata.version("polyaccel")}
    facts |= {"python": sys.version, "port": free_port()}
    if port is None:
        _say(**facts)
        orders = LauncherChannel(control, number)
    else:
        key = secrets.token_bytes(KEY_NBYTES)
        _say(**facts, key=key.hex())
        address = os.environ.get("SSH_CONNECTION", host).split()[0]
        try:
            connection, records = call_back(address, port, number, key)
        except OSError as error:
            why = f"the launcher cannot be reached at {address}, port {port}: {error} (--launcher ssh needs no port)"
            _say(number=number, code=1, why=why)
            _say(number=number, ended=1)
            return 1
        orders = CalledOrders(connection, records, control, number)
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
        return  # nobody is there to read it


def start(arguments: Sequence[str]) -> int:
    """`main` for the arguments of the command."""
    if len(arguments) == 1:
        return main(int(arguments[0]))
    numbers, place, port = arguments
    return main(int(numbers.split(",")[int(place)]), int(port))


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
