"""SIGINT and SIGTERM while a run trains, as requests on which all ranks act together at the end of a step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from polyaccel.comm.default import default_communicator

_TORCHRUN = "TORCHELASTIC_RUN_ID"
_PASSED_ON_WITHIN_S = 2.0


class StopRequest:
    """Records SIGINT (Ctrl-C) and SIGTERM from its creation on, so that a loop can save a checkpoint before it ends.

    A second signal ends the process at once. torchrun passes a Ctrl-C on to ranks that have it from the terminal: there
    two within two seconds are one. A signal that is ignored, as under nohup, stays ignored. Create it in the main
    thread.

    Args:
        clock: Seconds of a monotonic clock.

    Attributes:
        signum: The signal that asked this rank to stop; 0 without one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.signum = 0
        self._clock = clock
        self._same_until_s = 0.0
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._note)

    def agreed(self) -> int:
        """Return the signal on which all ranks stop, 0 without one. Collective: call it once a step on every rank.

        Returns:
            The largest signal number that any rank has got so far.

        Raises:
            CommError: A rank is gone.
        """
        signals: list[int] = default_communicator().all_gather_object(self.signum)
        return max(signals)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now_s = self._clock()
        if not self.signum:
            self.signum = signum
            self._same_until_s = now_s + (_PASSED_ON_WITHIN_S if _TORCHRUN in os.environ else 0.0)
        elif now_s >= self._same_until_s:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
