"""A save on several places while training continues, by a thread of each rank.

A process next to the rank, which writes where all ranks see one storage, cannot take part in collectives, and hosts
have copies to send each other. So a thread takes the steps of a save here, with its own communicator and out
of the copy in memory. It leaves the interpreter to training while it reads, writes, sends and computes checksums.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from threading import Thread
from typing import Any

from polyaccel.checkpoint.collective_call import describe
from polyaccel.checkpoint.save.async_client import SaveOutcome, waiting_for_nobody
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType


def thread_communicator(communicator: Communicator) -> Communicator | None:
    """Split a communicator for a thread; None on devices, where two may wait for each other. Collective."""
    if communicator.allocate(1, DType.UINT8).device.type != "cpu":
        return None
    return communicator.split(range(communicator.world_size))


class SavingThread:
    """A rank's part of a save, under way in a thread: what `async_client.Pending` is for one of a process."""

    def __init__(self, action: Callable[[], Any], limit_s: float) -> None:
        self.is_reported = False
        self.limit_s = limit_s
        self._of = os.getpid()
        self._abandoned: SaveOutcome | None = None
        self._outcome = Future[SaveOutcome]()
        # A daemon: the end of the process does not wait for one whose file system hangs.
        Thread(target=lambda: self._outcome.set_result(_ended(action)), name="polyaccel save", daemon=True).start()

    def outcome(self, timeout_s: float = 0.0) -> SaveOutcome | None:
        """As `Pending.outcome`."""
        if self._of != os.getpid():  # forked from the process whose save it is
            return SaveOutcome()
        if self._abandoned is not None:
            return self._abandoned
        wait_for([self._outcome], timeout_s)
        return self._outcome.result() if self._outcome.done() else None

    def describe(self) -> str:
        """A sentence about the thread."""
        return "the thread that writes checkpoints has not ended"

    def abandon(self, waited_s: float) -> None:
        """Wait for it no longer."""
        if self.outcome() is None:
            message = f"it has not ended within {waited_s:.0f} s: {self.describe()}"
            self._abandoned = SaveOutcome(message, "look at its file system, or raise checkpoint.timeout_s")

    def give_up(self) -> None:
        """The ranks' threads receive each other's failures by themselves."""

    def finish_soon(self) -> None:
        """They wait for each other no longer than their communicator does."""


def _ended(action: Callable[[], Any]) -> SaveOutcome:
    with waiting_for_nobody():
        try:
            action()
        except Exception as error:  # whatever it is, the rank has to receive it
            return SaveOutcome(*describe(error))
    return SaveOutcome()
