"""Ctrl-C and SIGTERM while a run goes on: wishes, which all ranks grant together at the end of a step."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

_TORCHRUN = "TORCHELASTIC_RUN_ID"
_PASSED_ON_WITHIN_S = 2.0


class StopWish:
    """Takes note of SIGINT and SIGTERM from `listen` until the process ends; the second one ends it at once.

    torchrun passes a Ctrl-C on to ranks that have it from the terminal: there two in quick succession are one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._same_until_s = 0.0
        self.signum = 0
        """The signal that asked this rank to stop; 0 for none."""

    def listen(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) != signal.SIG_IGN:  # nohup and background jobs ignore Ctrl-C
                signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now_s = self._clock()
        if not self.signum:
            self.signum = signum
            self._same_until_s = now_s + (_PASSED_ON_WITHIN_S if _TORCHRUN in os.environ else 0.0)
        elif now_s >= self._same_until_s:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)


def say_interrupted() -> int:
    """One line for the whole job, when Ctrl-C has come where no step is taken. Returns the exit code."""
    if os.environ.get("RANK", "0") == "0":
        print("interrupted; --resume goes on from the last checkpoint, if there is one", file=sys.stderr)
    return 128 + signal.SIGINT
