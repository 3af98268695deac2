"""Direct exchange without a transport: what a collective waits for, who owns what is sent, which tags meet."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.base import Communicator
from polyaccel.comm.collective import Collective, Operation
from polyaccel.comm.collectives.p2p import Exchange, Message, P2PCollectives, Steps
from polyaccel.comm.collectives.scratch import ScratchPool
from polyaccel.comm.work import DoneWork, Work
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp

HOST = CpuAccelerator("numpy")


class NotedExchange(Exchange):
    """Messages that nobody carries."""

    def start(self, buffer: Buffer, peer: int, tag: int, *, sends: bool) -> Message:
        return Message(peer, ("to" if sends else "from", tag))


class Noted(P2PCollectives[NotedExchange]):
    """Rank 0 of two, whose last collective waits where the test leaves it."""

    rank, world_size, ranks, backend, accelerator, timeout_s = 0, 2, (0, 1), "noted", HOST, 1.0

    def __init__(self) -> None:
        self.pool = ScratchPool(HOST)
        self.steps: Steps = iter(())

    def new_exchange(self, collective: Collective) -> NotedExchange:
        return NotedExchange(self, collective)

    def carry(self, exchange: NotedExchange, steps: Steps, written: Any, *, rounds: int) -> Work:
        self.steps = steps
        return DoneWork()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def memory_of(buffer: Buffer) -> weakref.ref[Any]:
    """A reference to what owns the memory."""
    owner = buffer.raw
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return weakref.ref(owner)


SENDING: dict[str, Callable[[Noted, Buffer], Any]] = {
    "all_reduce": lambda comm, mine: comm.all_reduce(mine, async_op=True),
    "reduce_scatter": lambda comm, mine: comm.reduce_scatter(HOST.allocate(10, DType.FLOAT32), mine, async_op=True),
    "all_gather": lambda comm, mine: comm.all_gather(mine, mine.view(0, 10), async_op=True),
    "broadcast": lambda comm, mine: comm.broadcast(mine, 0, async_op=True),
    "all_to_all": lambda comm, mine: comm.all_to_all(HOST.allocate(20, DType.FLOAT32), mine, async_op=True),
    "send": lambda comm, mine: comm.send(mine, 1, async_op=True),
}


@pytest.mark.parametrize("kind", SENDING)
def test_what_is_sent_lives_until_the_peer_has_it(kind: str) -> None:
    comm = Noted()
    mine = HOST.allocate(20, DType.FLOAT32)
    memory = memory_of(mine)
    SENDING[kind](comm, mine)
    del mine
    waits_for_sends = 0
    for awaited in comm.steps:
        gc.collect()
        assert memory() is not None
        waits_for_sends += any(message.work[0] == "to" for message in awaited)
    assert waits_for_sends
    comm.steps = iter(())
    gc.collect()
    assert memory() is None


@given(st.integers(0, 10**6), st.integers(1, 1000), st.sampled_from([32767, 2**29 - 1, 2**31 - 1]))
def test_neighbouring_calls_have_tags_of_their_own(seq: int, later: int, most_tag: int) -> None:
    buffer = HOST.allocate(4, DType.FLOAT32)
    tags = []
    for number in (seq, seq + later):
        call = Collective(Operation.ALL_REDUCE, numel=4, dtype=DType.FLOAT32, number=number)
        exchange = NotedExchange(Noted(), call, most_tag=most_tag)
        for phase in (0, 1):
            exchange.send(buffer, 1, phase=phase)
        tags += [message.work[1] for message in exchange.sends()]
    assert len(set(tags)) == 4
    assert all(0 <= tag <= most_tag for tag in tags)


def test_other_calls_have_other_tags() -> None:
    calls = [
        Collective(Operation.ALL_REDUCE, numel=60, dtype=DType.FLOAT32),
        Collective(Operation.ALL_REDUCE, numel=60, dtype=DType.FLOAT32, reduction=ReduceOp.MAX),
        Collective(Operation.ALL_REDUCE, numel=59, dtype=DType.FLOAT32),
        Collective(Operation.ALL_REDUCE, numel=60, dtype=DType.INT32),
        Collective(Operation.ALL_GATHER, numel=60, dtype=DType.FLOAT32),
        Collective(Operation.ALL_GATHER, numel=60, dtype=DType.FLOAT32, counts=(20, 40)),
        Collective(Operation.ALL_GATHER, numel=60, dtype=DType.FLOAT32, counts=(40, 20)),
    ]
    buffer = HOST.allocate(4, DType.FLOAT32)
    tags = set()
    for call in calls:
        call.number = 3
        exchange = NotedExchange(Noted(), call, most_tag=2**29 - 1)
        exchange.send(buffer, 1)
        tags |= {message.work[1] for message in exchange.sends()}
    assert len(tags) == len(calls)
