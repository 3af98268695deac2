"""The signals that a launcher passes on to its ranks, and how it collects them.

[Note: Forwarded signals]
`ENDING` ask a job to end; they go to the process groups of all ranks. `NOTICES` are all others that schedulers send
and whose default would end the launcher alone: SIGUSR1 and SIGUSR2 (Slurm's --signal, submitit), SIGXCPU (Grid
Engine), timers, real-time signals. They go to the ranks' own processes, and a rank's handler says what they mean; a
rank without one ends of it, as under srun. `SILENT` change nothing where no handler is. Left to the system are SIGCHLD,
which is this process's own, those that stop and continue a process, those that nothing can catch, and those that a
fault of this process raises.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any

from polyaccel.errors import LaunchError

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT)
_NOTICE_NAMES = ("SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGPWR", "SIGSTKFLT")
SILENT = (signal.SIGWINCH,)


def _notices() -> tuple[int, ...]:
    named = [int(getattr(signal, name)) for name in _NOTICE_NAMES if hasattr(signal, name)]
    real_time = range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if hasattr(signal, "SIGRTMIN") else ()
    return (*named, *map(int, SILENT), *(number for number in real_time if number in signal.valid_signals()))


NOTICES = _notices()
PASSED_ON = (*map(int, ENDING), *NOTICES)
"""See [Note: Forwarded signals]."""


class SignalInbox:
    """Signals as messages: they wake up the main loop, which reads their numbers in order.

    Collects the given signals between `__enter__` and `__exit__`, which puts the former handlers back. `news` are
    descriptors that wake the loop up too.

    A signal that is ignored on entry stays ignored (nohup, a shell's background job), SIGCHLD excepted; of `NOTICES`
    those are collected that nothing else in this process handles.
    Python delivers signals to the main thread only; entering elsewhere raises LaunchError.
    """

    def __init__(self, signals: Iterable[int], news: Sequence[int] = ()) -> None:
        self._signals = tuple(signals)
        self._news = tuple(news)
        self._former: dict[int, Any] = {}
        self._former_fd = -1
        self._read_fd = self._write_fd = -1

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is not threading.main_thread():
            raise LaunchError("ranks can be started from the main thread only", hint="call run() from there")
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._former_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in self._signals:
            former = signal.getsignal(signum)
            is_free = former == signal.SIG_DFL if signum in NOTICES else former != signal.SIG_IGN
            if signum == signal.SIGCHLD or is_free:
                self._former[signum] = signal.signal(signum, _keep_only_the_number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._former_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def wait(self, timeout_s: float | None) -> list[int]:
        """Return signals since the last call; blocks until one, readable `news`, or `timeout_s`."""
        ready, _, _ = select.select([self._read_fd, *self._news], [], [], timeout_s)
        return list(os.read(self._read_fd, 4096)) if self._read_fd in ready else []


def _keep_only_the_number(signum: int, frame: FrameType | None) -> None:
    """Python has written the number to the wake-up descriptor already; without a handler it would not."""
