"""The contract suite of communicators catches what it is for: one mistake each, and the test that must notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any, ClassVar

import pytest

from polyaccel.comm.backends.local.backend import LocalCommunicator
from polyaccel.comm.collective import Collective, Operation
from polyaccel.comm.work import DoneWork, Work
from polyaccel.errors import CommError
from polyaccel.testkit.comm import CommContract
from polyaccel.testkit.contract import list_tests, run_test
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.types import ReduceOp


class Honest(LocalCommunicator):
    """What every liar is, but for one thing."""

    def __init__(self, inner: LocalCommunicator) -> None:
        super().__init__(inner.rank, inner._place, inner.accelerator)


class SumsAverages(Honest):
    def start(self, collective: Collective) -> Work:
        if collective.operation is Operation.ALL_REDUCE and collective.reduction is ReduceOp.AVG:
            collective.reduction = ReduceOp.SUM
        return super().start(collective)


class LosesTheLastElement(Honest):
    def start(self, collective: Collective) -> Work:
        if collective.operation is Operation.ALL_REDUCE:
            buffer = collective.buffer_received()
            shorter = buffer.view(0, max(0, buffer.numel - 1))
            collective = collective.on(shorter, shorter)
        return super().start(collective)


class KeepsTheFirstPart(Honest):
    def start(self, collective: Collective) -> Work:
        work = super().start(collective)
        if collective.operation is Operation.REDUCE_SCATTER and not collective.is_uneven:
            source, out = collective.buffer_sent(), collective.buffer_received()
            work.wait()
            whole = self.accelerator.allocate(source.numel, source.dtype)
            whole.copy_from(source)
            super().all_reduce(whole, collective.reduction)
            out.copy_from(whole.view(0, out.numel))
        return work


class WritesIntoTheSource(Honest):
    def start(self, collective: Collective) -> Work:
        work = super().start(collective)
        if collective.operation is Operation.REDUCE_SCATTER and not collective.is_uneven:
            source, out = collective.buffer_sent(), collective.buffer_received()
            work.wait()
            source.view(self.rank * out.numel, out.numel).copy_from(out)
        return work


class AddsTheOtherWayRound(Honest):
    """Says that it adds in rank order."""

    def start(self, collective: Collective) -> Work:
        if collective.operation is Operation.ALL_REDUCE:
            buffer = collective.buffer_received()
            parts = self.accelerator.allocate(buffer.numel * self.world_size, buffer.dtype)
            super().all_gather(parts, buffer)
            buffer.copy_from(parts.view((self.world_size - 1 - self.rank) * buffer.numel, buffer.numel))
        return super().start(collective)


class TakesTheFirstRoot(Honest):
    def start(self, collective: Collective) -> Work:
        if collective.operation is Operation.BROADCAST:
            collective.root = 0
        return super().start(collective)


class GathersBackwards(Honest):
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return super().all_gather_bytes(data)[::-1]


class ReturnsBeforeTheEnd(Honest):
    """A wait that waits for nothing."""

    def start(self, collective: Collective) -> Work:
        if collective.operation is not Operation.ALL_REDUCE:
            return super().start(collective)
        collective.async_op = True
        super().start(collective)
        return DoneWork()


class DoesNotCountWrites(Honest):
    def start(self, collective: Collective) -> Work:
        buffer = collective.target
        if buffer is None or collective.operation is not Operation.BROADCAST:
            return super().start(collective)
        generation = buffer.generation
        work = super().start(collective)
        buffer._writes.value = generation  # type: ignore[attr-defined]
        return work


class TakesAnyGroup(Honest):
    def split(self, ranks: Sequence[int]) -> LocalCommunicator | None:
        return super().split(list(dict.fromkeys(ranks)))


class NeverCloses(Honest):
    def split(self, ranks: Sequence[int]) -> LocalCommunicator | None:
        part = super().split(ranks)
        if part is not None:
            part.close = lambda: None  # type: ignore[method-assign]
        return part


class KeepsItsWorks(Honest):
    kept: ClassVar[list[Work]] = []

    def start(self, collective: Collective) -> Work:
        work = super().start(collective)
        if collective.operation is Operation.ALL_GATHER:
            self.kept.append(work)
        return work


class StartsAThreadACall(Honest):
    ends: ClassVar[Event] = Event()

    def start(self, collective: Collective) -> Work:
        if collective.operation is Operation.ALL_TO_ALL:
            Thread(target=self.ends.wait, daemon=True).start()
        return super().start(collective)


class HearsNothing(Honest):
    """Neither debug mode nor the calls themselves, which compare too, learn from it what the others called."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data for _ in super().all_gather_bytes(data)]

    def start(self, collective: Collective) -> Work:
        if collective.operation in (Operation.ALL_REDUCE, Operation.BROADCAST):
            return DoneWork()
        return super().start(collective)


class NamesNobody(Honest):
    """Says that the others called something else, and not what."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        gathered = super().all_gather_bytes(data)
        if gathered != [data] * len(gathered):
            raise CommError("ranks disagree")
        return gathered


LIES: dict[type[Honest], tuple[str, str]] = {
    SumsAverages: ("test_all_reduce", "all_reduce ReduceOp.AVG"),
    LosesTheLastElement: ("test_all_reduce", "all_reduce ReduceOp.SUM"),
    ReturnsBeforeTheEnd: ("test_all_reduce", "all_reduce ReduceOp.SUM"),
    KeepsTheFirstPart: ("test_reduce_scatter", "reduce_scatter ReduceOp.SUM"),
    WritesIntoTheSource: ("test_reduce_scatter", "the source of a reduce_scatter"),
    TakesTheFirstRoot: ("test_broadcast", "broadcast from 1"),
    GathersBackwards: ("test_objects", "all_gather_object of 0 bytes"),
    AddsTheOtherWayRound: ("test_reductions_agree_bitwise", "DType.FLOAT32 on rank"),
    DoesNotCountWrites: ("test_results_are_marked_written", "broadcast wrote a buffer"),
    TakesAnyGroup: ("test_nonsense_is_refused", "a group with a rank twice was accepted"),
    HearsNothing: ("test_disagreement", "ranks made different calls (0)"),
    NamesNobody: ("test_disagreement", "ranks made different calls (0)"),
    KeepsItsWorks: ("test_nothing_is_left_over", "after 20 rounds of calls rank"),
    StartsAThreadACall: ("test_nothing_is_left_over", "threads and open files were"),
    NeverCloses: ("test_close", "a call on a closed group was accepted"),
}


@pytest.mark.parametrize("kind", LIES, ids=lambda kind: kind.__name__)
def test_a_communicator_that_lies_is_caught(kind: type[Honest]) -> None:
    class Suite(CommContract):
        world_sizes = (3,)

        def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
            return run_threads(world_size, lambda comm: body(kind(comm), *args))

    test, said = LIES[kind]
    StartsAThreadACall.ends.clear()
    outcome = run_test(test, getattr(Suite(), test))
    KeepsItsWorks.kept.clear()
    StartsAThreadACall.ends.set()
    assert outcome.state == "failed", outcome
    assert said in outcome.reason


def test_one_that_does_not_passes() -> None:
    class Suite(CommContract):
        world_sizes = (3,)

        def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
            return run_threads(world_size, lambda comm: body(Honest(comm), *args))

    tests = {test for test, _ in LIES.values()}
    assert tests <= set(list_tests(CommContract))
    for test in tests:
        getattr(Suite(), test)()
