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
from polyaccel.buffer import Buffer
from polyaccel.comm.arguments import Call
from polyaccel.comm.base import Communicator, DoneWork, Work
from polyaccel.comm.exchange import Exchange, ExchangeCollectives, Message, Steps
from polyaccel.comm.scratch import ScratchPool
from polyaccel.types import DType

HOST = CpuAccelerator("numpy")


class NotedExchange(Exchange):
    """Messages that nobody carries."""

    def start(self, buffer: Buffer, peer: int, tag: int, *, sends: bool) -> Message:
        return Message(peer, ("to" if sends else "from", tag))


class Noted(ExchangeCollectives[NotedExchange]):
    """Rank 0 of two, whose last collective waits where the test leaves it."""

    rank, world_size, ranks, backend, accelerator, timeout_s = 0, 2, (0, 1), "noted", HOST, 1.0

    def __init__(self) -> None:
        self.pool = ScratchPool(HOST)
        self._calls = 0
        self._messages: dict[tuple[int, int], int] = {}
        self.steps: Steps = iter(())

    def new_exchange(self, call: Call, seq: int) -> NotedExchange:
        return NotedExchange(call, seq, self.pool)

    def run(self, exchange: NotedExchange, steps: Steps, written: Any, *, async_op: bool, rounds: int) -> Work:
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
    pool = ScratchPool(HOST)
    buffer = HOST.allocate(4, DType.FLOAT32)
    tags = []
    for number in (seq, seq + later):
        exchange = NotedExchange(Call("all_reduce", 4, DType.FLOAT32, "sum"), number, pool, most_tag=most_tag)
        for phase in (0, 1):
            exchange.send(buffer, 1, phase=phase)
        tags += [message.work[1] for message in exchange.sends()]
    assert len(set(tags)) == 4
    assert all(0 <= tag <= most_tag for tag in tags)


def test_other_calls_have_other_tags() -> None:
    calls = [
        Call("all_reduce", 60, DType.FLOAT32, "sum"),
        Call("all_reduce", 60, DType.FLOAT32, "max"),
        Call("all_reduce", 59, DType.FLOAT32, "sum"),
        Call("all_reduce", 60, DType.INT32, "sum"),
        Call("all_gather", 60, DType.FLOAT32),
    ]
    buffer = HOST.allocate(4, DType.FLOAT32)
    tags = set()
    for call in calls:
        exchange = NotedExchange(call, 3, ScratchPool(HOST), most_tag=2**29 - 1)
        exchange.send(buffer, 1)
        tags |= {message.work[1] for message in exchange.sends()}
    assert len(tags) == len(calls)
