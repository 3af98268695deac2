"""The contract suite of communicators catches what it is for: one mistake each, and the test that must notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any, ClassVar

import pytest

from polyaccel.buffer import Buffer
from polyaccel.comm.base import DoneWork, Work
from polyaccel.comm.local import LocalCommunicator
from polyaccel.errors import CommError
from polyaccel.testkit.comm import CommContract
from polyaccel.testkit.contract import list_tests, run_test
from polyaccel.testkit.threads import run_threads
from polyaccel.types import ReduceOp


class Honest(LocalCommunicator):
    """What every liar is, but for one thing."""

    def __init__(self, inner: LocalCommunicator) -> None:
        super().__init__(inner.rank, inner._place, inner.accelerator)


class SumsAverages(Honest):
    def all_reduce(self, buffer: Buffer, op: ReduceOp = ReduceOp.SUM, **options: Any) -> Work:
        return super().all_reduce(buffer, ReduceOp.SUM if op is ReduceOp.AVG else op, **options)


class LosesTheLastElement(Honest):
    def all_reduce(self, buffer: Buffer, op: ReduceOp = ReduceOp.SUM, **options: Any) -> Work:
        return super().all_reduce(buffer.view(0, max(0, buffer.numel - 1)), op, **options)


class KeepsTheFirstPart(Honest):
    def reduce_scatter(self, out: Buffer, source: Buffer, op: ReduceOp = ReduceOp.SUM, **options: Any) -> Work:
        super().reduce_scatter(out, source, op)
        whole = self.accelerator.allocate(source.numel, source.dtype)
        whole.copy_from(source)
        super().all_reduce(whole, op)
        out.copy_from(whole.view(0, out.numel))
        return DoneWork()


class WritesIntoTheSource(Honest):
    def reduce_scatter(self, out: Buffer, source: Buffer, op: ReduceOp = ReduceOp.SUM, **options: Any) -> Work:
        work = super().reduce_scatter(out, source, op)
        source.view(self.rank * out.numel, out.numel).copy_from(out)
        return work


class AddsTheOtherWayRound(Honest):
    """Says that it adds in rank order."""

    def all_reduce(self, buffer: Buffer, op: ReduceOp = ReduceOp.SUM, **options: Any) -> Work:
        parts = self.accelerator.allocate(buffer.numel * self.world_size, buffer.dtype)
        super().all_gather(parts, buffer)
        buffer.copy_from(parts.view((self.world_size - 1 - self.rank) * buffer.numel, buffer.numel))
        return super().all_reduce(buffer, op, **options)


class TakesTheFirstRoot(Honest):
    def broadcast(self, buffer: Buffer, root: int, **options: Any) -> Work:
        return super().broadcast(buffer, 0, **options)


class GathersBackwards(Honest):
    def all_gather_object(self, value: Any) -> list[Any]:
        return super().all_gather_object(value)[::-1]


class ReturnsBeforeTheEnd(Honest):
    """A wait that waits for nothing."""

    def all_reduce(self, buffer: Buffer, op: ReduceOp = ReduceOp.SUM, **options: Any) -> Work:
        super().all_reduce(buffer, op, async_op=True)
        return DoneWork()


class DoesNotCountWrites(Honest):
    def broadcast(self, buffer: Buffer, root: int, **options: Any) -> Work:
        generation = buffer.generation
        work = super().broadcast(buffer, root, **options)
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

    def all_gather(self, out: Buffer, source: Buffer, **options: Any) -> Work:
        self.kept.append(super().all_gather(out, source, **options))
        return self.kept[-1]


class StartsAThreadACall(Honest):
    ends: ClassVar[Event] = Event()

    def all_to_all(self, out: Buffer, source: Buffer, **options: Any) -> Work:
        Thread(target=self.ends.wait, daemon=True).start()
        return super().all_to_all(out, source, **options)


class HearsNothing(Honest):
    """Neither debug mode nor the calls themselves, which compare too, learn from it what the others called."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value for _ in super().all_gather_object(value)]

    def all_reduce(self, buffer: Buffer, op: ReduceOp = ReduceOp.SUM, **options: Any) -> Work:
        return DoneWork()

    def broadcast(self, buffer: Buffer, root: int, **options: Any) -> Work:
        return DoneWork()


class NamesNobody(Honest):
    """Says that the others called something else, and not what."""

    def all_gather_object(self, value: Any) -> list[Any]:
        values = super().all_gather_object(value)
        if values != [value] * len(values):
            raise CommError("ranks disagree")
        return values


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
