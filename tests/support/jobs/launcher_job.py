"""A `polyaccel run` in a process of its own, for tests: its output line by line, its ranks by pid, a time limit."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

LIMIT_S = 150.0

_PREAMBLE = """
import os, signal, subprocess, sys
rank = int(os.environ["RANK"])
def start(code, **options):  # a child that says that it runs, and its pid, before this returns
    command = [sys.executable, "-S", "-c", "print(flush=True);" + code]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
    child.stdout.readline()
    print("child", child.pid, flush=True)
def ready():
    print("ready", os.getpid(), flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
def wait():  # until the test calls let_go
    signal.sigwait([signal.SIGUSR1])
"""


class Job:
    """`script`, behind a preamble with `rank`, `ready`, `start` and `wait`, under `polyaccel run options`."""

    def __init__(
        self,
        directory: Path,
        script: str,
        *options: str,
        nproc: int = 2,
        arguments: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        stdout: int = subprocess.PIPE,
        ignored: tuple[signal.Signals, ...] = (),
        launcher: tuple[str, ...] = ("-m", "polyaccel"),
    ) -> None:
        path = directory / "script.py"
        path.write_text(_PREAMBLE + script)

        def reset() -> None:  # a shell that starts pytest in the background ignores SIGINT and SIGQUIT
            for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(signum, signal.SIG_IGN if signum in ignored else signal.SIG_DFL)

        inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        self.process = subprocess.Popen(
            [sys.executable, *launcher, "run", "--nproc", str(nproc), *options, str(path), *arguments],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.PIPE,
            bufsize=0,  # communicate() would miss what a buffer holds
            env={**inherited, **(environment or {})},
            cwd=directory,
            start_new_session=True,
            preexec_fn=reset,
        )
        # A launcher that is killed takes its ranks along, and ends every read of its output.
        self._watchdog = threading.Timer(LIMIT_S, self.process.kill)
        self._watchdog.start()
        self.seen = {"stdout": b"", "stderr": b""}
        self._unread = dict(self.seen)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *args: object) -> None:
        self._watchdog.cancel()
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def lines(self, name: str) -> Iterator[str]:
        """The lines of "stdout" or "stderr" as they come."""
        pipe: IO[bytes] = getattr(self.process, name)
        data = b"\n"
        while data:
            line, end, rest = self._unread[name].partition(b"\n")
            if end:
                self._unread[name] = rest
                self.seen[name] += line + end
                yield (line + end).decode()
            else:
                data = os.read(pipe.fileno(), 1 << 16)
                self._unread[name] += data

    def wait_for(self, pattern: str, name: str = "stdout") -> re.Match[str]:
        """The match of `pattern` in the first line that has one."""
        for line in self.lines(name):
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"no {pattern!r} in {name}: {self.seen}; exit code {self.process.wait()}")

    def pids(self, *, children: int = 0) -> tuple[list[int], list[int]]:
        """The pids of two ranks that called ready(), by rank, and of what they started before."""
        ready: dict[int, int] = {}
        started: list[int] = []
        while len(ready) < 2 or len(started) < children:
            rank, word, pid = self.wait_for(r"^\[rank (\d)\] (ready|child) (\d+)$").groups()
            if word == "ready":
                ready[int(rank)] = int(pid)
            else:
                started.append(int(pid))
        return [ready[rank] for rank in sorted(ready)], started

    def finish(self) -> tuple[int, str, str]:
        """Exit code, standard output and standard error, with what was read before."""
        stdout, stderr = self.process.communicate()
        assert self._watchdog.is_alive(), f"the launcher ran for {LIMIT_S} s: {self.seen} {stdout!r} {stderr!r}"
        out, err = (
            self.seen[name] + self._unread[name] + (rest or b"")
            for name, rest in (("stdout", stdout), ("stderr", stderr))
        )
        return self.process.returncode, out.decode(errors="replace"), err.decode()


def let_go(pid: int) -> None:
    """End a rank's wait()."""
    os.kill(pid, signal.SIGUSR1)


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in b"ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pid: int) -> bool:
    """Whether the process, not a child of ours, ends within the limit."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], LIMIT_S)[0])
    finally:
        os.close(fd)
