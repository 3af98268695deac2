"""How far the clocks of ranks are from rank 0's, measured by messages (the way of NTP, D. Mills)."""

from __future__ import annotations

from dataclasses import dataclass
from time import time

from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType

_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Rank 0's clock is `ahead_s` before a rank's own, give or take `error_s`: half the journey of the fastest of a few
    messages there and back."""

    ahead_s: float
    error_s: float


def clock_offsets(communicator: Communicator) -> tuple[ClockOffset, ...]:
    """The offset of each rank. Collective."""
    token = communicator.allocate(1, DType.FLOAT32)
    samples: list[tuple[float, float]] = []
    """On rank 0, when the messages of all ranks came, in turn; elsewhere when one was sent, and its answer came."""
    for rank in range(1, communicator.world_size):
        for _ in range(_ROUNDS):
            if communicator.rank == 0:
                communicator.recv(token, rank).wait()
                samples.append((time(), 0.0))
                communicator.send(token, rank).wait()
            elif communicator.rank == rank:
                sent_s = time()
                communicator.send(token, 0).wait()
                communicator.recv(token, 0).wait()
                samples.append((sent_s, time()))
    came, *others = communicator.all_gather_object(samples)
    offsets = [ClockOffset(0.0, 0.0)]
    for at, journeys in enumerate(others):
        turns = zip(came[at * _ROUNDS : (at + 1) * _ROUNDS], journeys, strict=True)
        took, ahead = min((back - sent, there - (sent + back) / 2) for (there, _), (sent, back) in turns)
        offsets.append(ClockOffset(ahead, took / 2))
    return tuple(offsets)
