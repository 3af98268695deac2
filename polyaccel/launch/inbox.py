"""Signals as messages: they wake the main loop up, which reads their numbers in order."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

from polyaccel.errors import LaunchError


class SignalInbox:
    """Collects the given signals between `__enter__` and `__exit__`, which puts the former handlers back.

    A signal that is ignored on entry stays ignored (nohup, a shell's background job), SIGCHLD excepted.
    Python delivers signals to the main thread only; entering elsewhere raises LaunchError.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self._signals = tuple(signals)
        self._former: dict[signal.Signals, Any] = {}
        self._former_fd = -1
        self._read_fd = self._write_fd = -1

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is not threading.main_thread():
            raise LaunchError("ranks can be started from the main thread only", cure="call run() from there")
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._former_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in self._signals:
            if signum == signal.SIGCHLD or signal.getsignal(signum) != signal.SIG_IGN:
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

    def wait(self, timeout_s: float | None) -> list[signal.Signals]:
        """The signals that came since the last call, in order; blocks until there is one or `timeout_s` is over."""
        ready, _, _ = select.select([self._read_fd], [], [], timeout_s)
        return [signal.Signals(number) for number in os.read(self._read_fd, 4096)] if ready else []


def _keep_only_the_number(signum: int, frame: FrameType | None) -> None:
    """Python has written the number to the wake-up descriptor already; without a handler it would not."""
