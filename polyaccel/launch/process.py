"""A rank as a process: its start in its own session, its state, and the sentences that people read about it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from time import monotonic, sleep
from typing import IO

from polyaccel.errors import LaunchError
from polyaccel.job.readiness import READY_FD_VARIABLE, ReadinessPipe
from polyaccel.launch.affinity import memory_binding
from polyaccel.launch.base import RankSpec

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_WAIT_POLL_S = 0.005


_HINTS: dict[int, str] = {
    signal.SIGKILL: "out of memory? check dmesg",
    signal.SIGSEGV: "a crash in native code; PYTHONFAULTHANDLER=1 shows where",
    signal.SIGABRT: "native code gave up; its reason is among the last lines",
    signal.SIGBUS: "shared memory or a disk full? check df /dev/shm",
    signal.SIGILL: "native code built for another processor?",
    signal.SIGFPE: "a crash in native code; PYTHONFAULTHANDLER=1 shows where",
}


class ProcessState(Enum):
    """The state of a rank's process."""

    RUNNING = "running"
    STOPPED = "stopped"
    """By a signal like SIGSTOP, until SIGCONT. A debugger that holds it does not count."""
    ENDED = "ended"


class RankProcess:
    """The process of one rank, leader of a session and its own process group, so that a signal to the group reaches
    what it started, and Ctrl-C reaches the launcher only.

    `returncode` is None until it ended, then its exit code, or -N when signal N ended it.
    """

    def __init__(self, spec: RankSpec, process: subprocess.Popen[bytes]) -> None:
        self.spec = spec
        self.pid = process.pid
        self.stdout: IO[bytes] | None = process.stdout
        self.stderr: IO[bytes] | None = process.stderr
        self.state = ProcessState.RUNNING
        self.stop_signal = signal.SIGSTOP
        self.started_s = self.changed_s = monotonic()
        self._process = process

    @property
    def name(self) -> str:
        """How messages name it."""
        return f"rank {self.spec.rank} (pid {self.pid})"

    @property
    def prefix(self) -> bytes:
        """What stands before each line that it prints."""
        return f"[rank {self.spec.rank}] ".encode()

    def filter_output(self, data: bytes, *, is_error: bool) -> bytes:
        """What is to be shown of `data`, which it wrote to standard output, or to standard error."""
        return data

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    @property
    def lifetime_s(self) -> float:
        """Seconds from its start until its last change of state."""
        return self.changed_s - self.started_s

    def poll(self) -> bool:
        """Update the state from the kernel; True when it has changed. Never blocks."""
        before = self.state
        while self.state is not ProcessState.ENDED:
            # Not Popen.poll, which does not see a process stop.
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                self.state, self.stop_signal = ProcessState.STOPPED, signal.Signals(os.WSTOPSIG(status))
            elif os.WIFCONTINUED(status):
                self.state = ProcessState.RUNNING
            else:
                self.state = ProcessState.ENDED
                self._process.returncode = os.waitstatus_to_exitcode(status)
            self.changed_s = monotonic()
        return self.state is not before

    def wait(self) -> None:
        """Block until it has ended."""
        while self.state is not ProcessState.ENDED:
            if not self.poll():
                sleep(_WAIT_POLL_S)

    def signal_rank(self, signum: int) -> None:
        """Send `signum` to it alone. Only while it has not ended."""
        if self.state is not ProcessState.ENDED:
            os.kill(self.pid, signum)

    def signal_group(self, signum: int) -> None:
        """Send `signum` to it and to everything in its process group. Only while it has not ended."""
        if self.state is not ProcessState.ENDED:  # an unreaped leader keeps the number of its group from being reused
            os.killpg(self.pid, signum)


def start_rank(
    spec: RankSpec,
    arrivals: ReadinessPipe,
    *,
    owns_stdout: bool,
    owns_stderr: bool,
    kind: type[RankProcess] = RankProcess,
) -> RankProcess:
    """Start a rank with pipes, unless it `owns` the output; local rank 0 reads standard input."""
    try:
        process = subprocess.Popen(
            spec.command,
            stdin=None if spec.local_rank == 0 else subprocess.DEVNULL,
            stdout=None if owns_stdout else subprocess.PIPE,
            stderr=None if owns_stderr else subprocess.PIPE,
            bufsize=0,
            env={**spec.environment, READY_FD_VARIABLE: arrivals.name},
            pass_fds=(arrivals.write_fd,),
            start_new_session=True,
            preexec_fn=_child_setup(spec),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"rank {spec.rank} could not be started: {error}",
            hint="see whether the program, memory or a limit on processes (ulimit -u) is missing",
            value=spec.command,
        ) from error
    return kind(spec, process)


def signal_name(number: int) -> str:
    """SIGKILL for 9; a number without a name (real-time signals) as "signal 40"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_end(rank: RankProcess) -> str:
    """How a rank ended: "rank 1 (pid 123) was killed by SIGKILL after 12 s (out of memory? check dmesg)"."""
    code, after = rank.returncode or 0, f"after {_seconds(rank.lifetime_s)}"
    if code >= 0:
        return f"{rank.name} exited with code {code} {after}"
    hint = f" ({_HINTS[signum]})" if (signum := -code) in _HINTS else ""
    return f"{rank.name} was killed by {signal_name(signum)} {after}{hint}"


def describe_absence(gone: RankProcess, waiting: Sequence[RankProcess]) -> str:
    """A sentence about a rank that the others wait for in vain."""
    names = ", ".join(rank.name for rank in waiting)
    return f"{describe_end(gone)}, before it had joined the others (init_distributed); {names} waited for it"


def describe_stop(rank: RankProcess, stop_timeout_s: float) -> str:
    """A sentence about a rank that was stopped: how to continue it, and when the job ends otherwise."""
    limit = f"; the job ends in {_seconds(stop_timeout_s)} unless it is" if stop_timeout_s else ""
    return f"{rank.name} is stopped by {rank.stop_signal.name}; continue it with: kill -CONT {rank.pid}{limit}"


def with_last_lines(sentence: str, lines: Sequence[str]) -> str:
    """`sentence`, followed by the last lines of the rank's output, if there are any."""
    if not lines:
        return sentence
    return f"{sentence}; its last lines:" + "".join(f"\n  | {line}" for line in lines)


def exit_code(returncode: int) -> int:
    """A process's return code as a shell gives it: 128 + N for signal N."""
    return returncode if returncode >= 0 else 128 - returncode


def end_with_parent(parent: int, signum: int = signal.SIGKILL) -> Callable[[], None] | None:
    """A function by which a child of process `parent` asks the kernel, on Linux, for `signum` when its parent ends;
    None elsewhere. It ends a native call that keeps the interpreter's lock too, which no Python handler does.

    The kernel means the *thread* that started the child: let that be one that lives as long, for example the main
    thread.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
        if os.getppid() != parent:  # it ended before the request
            os.kill(os.getpid(), signum)

    return ask


def _child_setup(spec: RankSpec) -> Callable[[], None] | None:
    """Return the child's setup: bind cores and their memory, and die with the launcher's main thread on Linux."""
    ask = end_with_parent(os.getpid())
    bind = None if spec.cores is None else memory_binding(spec.cores)
    if ask is None and spec.cores is None:
        return None

    def setup() -> None:
        if spec.cores is not None:
            os.sched_setaffinity(0, spec.cores)
        if bind is not None:
            bind()
        if ask is not None:
            ask()

    return setup


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
