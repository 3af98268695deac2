"""The launcher's end of the keeper: starts it before the first rank, and lets it end after the last attempt."""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

from polyaccel.errors import LaunchError
from polyaccel.job.memory_server.process import READY

# Isolated: no file of the folder that the launcher was started in stands in for a module of Python.
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from polyaccel.job.memory_server.process import main
main(sys.argv)
"""
_START_S = 60.0
_MOST_SAID_NBYTES = 1 << 20
_ANSWER_S = 60.0
_END_S = 5.0


def can_keep() -> bool:
    """Whether this system has what a keeper needs: sockets and memory without names."""
    return sys.platform == "linux"


def keeper_name() -> str:
    """A name that no other keeper has."""
    return f"polyaccel-keeper-{secrets.token_hex(16)}"


class KeeperProcess:
    """A keeper that lives as long as this process, or until `close`, however often ranks are started."""

    def __init__(
        self,
        secret: bytes,
        limit_nbytes: int | None = None,
        *,
        name: str | None = None,
        way: Sequence[str] = (),
        silence_s: float = 0.0,
    ) -> None:
        """`limit_nbytes`: the most that it keeps; None is `default_limit_nbytes` where it runs. `way` is a command that
        becomes a keeper on another host, once its name, its limit and `silence_s` stand behind it: it ends when it was
        not asked whether it `answers` for so long.

        Raises LaunchError when it cannot be started.
        """
        self.name = name or keeper_name()
        self._secret = secret
        self._limit_nbytes = limit_nbytes or 0
        package = str(Path(__file__).parents[3])
        here = (sys.executable, "-I", "-c", _PROGRAM, package)
        self._command = (*(way or here), self.name, str(self._limit_nbytes), f"{silence_s:g}")
        self._is_far = bool(way)
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # the interrupt from a keyboard is the launcher's to pass on
            )
            assert process.stdin is not None
            try:
                with suppress(BrokenPipeError):  # then it has ended
                    process.stdin.write(self._secret.hex().encode() + b"\n")
                _await_ready(process)
            except OSError:
                process.kill()
                self._let_go(process)
                raise
        except OSError as error:
            raise LaunchError(
                f"the keeper of replicas could not be started: {error}",
                hint="see whether memory or a limit on processes (ulimit -u) is missing",
            ) from error
        return process

    def ensure(self) -> bool:
        """Start it again, empty, if it was killed. Return whether that was so. Raises LaunchError."""
        if self.is_there():
            return False
        self._let_go(self._process)
        self._process = self._start()
        return True

    def is_there(self) -> bool:
        """Whether it, or the way to it, has not ended."""
        return self._process.poll() is None

    def answers(self) -> bool:
        """Send it a sign of life. Return whether it answers."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None  # it was started with pipes
        assert stdout is not None
        try:
            stdin.write(b"\n")
            return bool(select.select([stdout], [], [], _ANSWER_S)[0] and stdout.read(1))
        except OSError:  # it has ended
            return False

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Let it end, with all that it keeps."""
        if self._is_far:  # the connection passes the end of the pipe on, and ends after it
            assert self._process.stdin is not None
            with suppress(OSError):
                self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        self._process.kill()
        self._let_go(self._process)

    def _let_go(self, process: subprocess.Popen[bytes]) -> None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait()


def _await_ready(process: subprocess.Popen[bytes]) -> None:
    """Read until the keeper reports that it is there; a shell on the way may write something before. Raises OSError."""
    assert process.stdout is not None
    said, until_s = b"", monotonic() + _START_S
    while READY not in said:
        if not select.select([process.stdout], [], [], max(0.0, until_s - monotonic()))[0]:
            raise OSError("it does not answer")
        data = os.read(process.stdout.fileno(), 4096)
        if not data or len(said) > _MOST_SAID_NBYTES:
            process.kill()
            raise OSError(f"it has ended with code {process.wait()}")
        said += data
