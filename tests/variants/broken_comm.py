"""Communicators that are broken in one way each, over those of ranks as threads or of gloo, and their backends."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import reduce
from threading import Event, Thread
from typing import Any, ClassVar

from variant_table import Broken, named

from polyaccel.accelerators.base import Accelerator, Probe
from polyaccel.comm.backends.torch.backend import GlooBackend
from polyaccel.comm.base import CommBackend, Communicator, Rendezvous
from polyaccel.comm.collective import Collective, Operation
from polyaccel.comm.work import DONE, CombinedWork, DoneWork, Work
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CommError


class Lie(Communicator):
    """A way to be broken, for `told_by`."""


def told_by(lie: type[Lie], communicator: Any) -> Any:
    """`communicator`, broken."""
    communicator.__class__ = type(lie.__name__, (lie, type(communicator)), {})
    return communicator


class SumsAverages(Lie):
    def start(self, collective: Collective) -> Work:
        if collective.operation is Operation.ALL_REDUCE and collective.reduction is ReduceOp.AVG:
            collective.reduction = ReduceOp.SUM
        return super().start(collective)


class LosesTheLastElement(Lie):
    def start(self, collective: Collective) -> Work:
        if collective.operation is Operation.ALL_REDUCE:
            buffer = collective.buffer_received()
            shorter = buffer.view(0, max(0, buffer.numel - 1))
            collective = collective.on(shorter, shorter)
        return super().start(collective)


def _is_even(collective: Collective, operation: Operation) -> bool:
    return collective.operation is operation and not collective.is_uneven


class KeepsTheFirstPart(Lie):
    def start(self, collective: Collective) -> Work:
        work = super().start(collective)
        if _is_even(collective, Operation.REDUCE_SCATTER):
            source, out = collective.buffer_sent(), collective.buffer_received()
            work.wait()
            whole = self.accelerator.allocate(source.numel, source.dtype)
            whole.copy_from(source)
            super().all_reduce(whole, collective.reduction)
            out.copy_from(whole.view(0, out.numel))
        return work


class WritesIntoTheSource(Lie):
    def start(self, collective: Collective) -> Work:
        work = super().start(collective)
        if _is_even(collective, Operation.REDUCE_SCATTER):
            source, out = collective.buffer_sent(), collective.buffer_received()
            work.wait()
            source.view(self.rank * out.numel, out.numel).copy_from(out)
        return work


class AddsTheOtherWayRound(Lie):
    """Says that it adds in rank order. Between two ranks the sums are the same."""

    def start(self, collective: Collective) -> Work:
        if collective.operation is Operation.ALL_REDUCE and collective.reduction is ReduceOp.SUM:
            buffer = collective.buffer_received()
            parts = self.accelerator.allocate(buffer.numel * self.world_size, buffer.dtype)
            super().all_gather(parts, buffer)
            buffer.copy_from(parts.view((self.world_size - 1 - self.rank) * buffer.numel, buffer.numel))
        return super().start(collective)


class RoundsEveryAddition(Lie):
    """Adds 16-bit numbers in 16 bits, instead of in float32 and rounded once."""

    def start(self, collective: Collective) -> Work:
        buffer = collective.target
        if collective.operation is not Operation.ALL_REDUCE or buffer is None or buffer.dtype is not DType.BFLOAT16:
            return super().start(collective)
        parts = self.accelerator.allocate(buffer.numel * self.world_size, buffer.dtype)
        super().all_gather(parts, buffer)
        arrays = [parts.view(rank * buffer.numel, buffer.numel).raw for rank in range(self.world_size)]
        buffer.copy_from(self.accelerator.wrap(reduce(lambda one, other: one + other, arrays)))
        return DONE


class ShiftsUnevenParts(Lie):
    """Puts every part but the first an element too early."""

    def start(self, collective: Collective) -> Work:
        work = super().start(collective)
        if collective.operation is Operation.ALL_GATHER and collective.is_uneven:
            work.wait()
            out, first = collective.buffer_received(), (collective.counts or (0,))[0]
            if 0 < first < out.numel - 1:
                later = self.accelerator.allocate(out.numel - first, out.dtype)
                later.copy_from(out.view(first, out.numel - first))
                out.view(first - 1, later.numel).copy_from(later)
        return work


class ForgetsThatPartsOverlap(Lie):
    """Clears the result of an in-place gather before it reads this rank's part there."""

    def start(self, collective: Collective) -> Work:
        if collective.operation is Operation.ALL_GATHER and collective.source is not None:
            source, out = collective.source, collective.buffer_received()
            if source.numel and out.data_ptr() <= source.data_ptr() < out.data_ptr() + out.nbytes:
                out.fill(0)
        return super().start(collective)


class ReadsFromTheStart(Lie):
    """Takes a view for what it was cut from, by an address in whole words."""

    def start(self, collective: Collective) -> Work:
        work = super().start(collective)
        target = collective.target
        if collective.operation is Operation.ALL_REDUCE and target is not None and target.data_ptr() % 8:
            work.wait()
            target.view(0, 1).fill(0)
        return work


class SwapsMessages(Lie):
    """The second of two messages comes first."""

    held: Any = None
    sent: int = 0

    def start(self, collective: Collective) -> Work:
        if collective.operation is not Operation.SEND or not collective.async_op:
            return super().start(collective)
        self.sent += 1
        if self.sent == 1:
            self.held = collective
            return DONE
        work = super().start(collective)
        if self.sent == 2:
            return CombinedWork([work, super().start(self.held)])
        return work


class TakesTheFirstRoot(Lie):
    def start(self, collective: Collective) -> Work:
        if collective.operation is Operation.BROADCAST:
            collective.root = 0
        return super().start(collective)


class GathersBackwards(Lie):
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return super().all_gather_bytes(data)[::-1]


class ReturnsBeforeTheEnd(Lie):
    """A wait that waits for nothing."""

    def start(self, collective: Collective) -> Work:
        if collective.operation is not Operation.ALL_REDUCE:
            return super().start(collective)
        kept = self.accelerator.allocate(collective.numel, collective.buffer_sent().dtype)
        kept.copy_from(collective.buffer_sent())
        super().start(collective.on(kept, kept)).wait()
        return DoneWork()


class DoesNotCountWrites(Lie):
    def start(self, collective: Collective) -> Work:
        buffer = collective.target
        if buffer is None or collective.operation is not Operation.BROADCAST:
            return super().start(collective)
        generation = buffer.version
        work = super().start(collective)
        work.wait()
        buffer._writes.value = generation  # type: ignore[attr-defined]
        return work


class TakesAnyGroup(Lie):
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        return super().split(list(dict.fromkeys(ranks)))


class NeverCloses(Lie):
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        part = super().split(ranks)
        if part is not None:
            part.close = lambda: None  # type: ignore[method-assign]
        return part


class KeepsItsWorks(Lie):
    kept: ClassVar[list[Work]] = []

    def start(self, collective: Collective) -> Work:
        work = super().start(collective)
        if collective.operation is Operation.ALL_GATHER:
            self.kept.append(work)
        return work


class KeepsCopies(Lie):
    """A copy of everything that it has reduced: no work and no buffer of its caller's."""

    kept: ClassVar[list[bytes]] = []

    def start(self, collective: Collective) -> Work:
        if collective.operation is Operation.REDUCE_SCATTER:
            self.kept.append(collective.buffer_sent().to_bytes())
        return super().start(collective)


class StartsAThreadACall(Lie):
    ends: ClassVar[Event] = Event()

    def start(self, collective: Collective) -> Work:
        if collective.operation is Operation.ALL_TO_ALL:
            Thread(target=self.ends.wait, daemon=True).start()
        return super().start(collective)


class HearsNothing(Lie):
    """Neither debug mode nor the calls themselves, which compare too, learn from it what the others called."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data for _ in super().all_gather_bytes(data)]

    def start(self, collective: Collective) -> Work:
        if collective.operation in (Operation.ALL_REDUCE, Operation.BROADCAST):
            return DoneWork()
        return super().start(collective)


class NamesNobody(Lie):
    """Says that the others called something else, and not what."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        gathered = super().all_gather_bytes(data)
        if gathered != [data] * len(gathered):
            raise CommError("ranks disagree")
        return gathered


class RaisesPlainErrors(Lie):
    """What means nothing is no error of ours."""

    def start(self, collective: Collective) -> Work:
        try:
            return super().start(collective)
        except CommError as error:
            raise RuntimeError(str(error)) from None
        except ValueError as error:
            raise RuntimeError(str(error)) from None


class NeverTimesOut(Lie):
    """Waits for a rank as long as it takes."""

    def start(self, collective: Collective) -> Work:
        if collective.label == "grads":
            Event().wait()
        return super().start(collective)


class SegfaultsInASum(Lie):
    def start(self, collective: Collective) -> Work:
        if collective.operation is Operation.ALL_REDUCE and self.rank == 1:
            ctypes.string_at(0)
        return super().start(collective)


class BrokenBackend(Broken, GlooBackend):
    """gloo, whose communicators tell `lie`."""

    API_VERSION = (3, 0)
    lie: ClassVar[type[Lie]] = Lie

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, "for the table of broken variants")

    def connect(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        communicator = GlooBackend().connect(rendezvous, accelerator, timeout_s=timeout_s)
        return communicator if rendezvous.world_size == 1 else told_by(self.lie, communicator)


class NeverMeets(BrokenBackend):
    def connect(self, rendezvous: Rendezvous, accelerator: Accelerator, *, timeout_s: float) -> Communicator:
        if rendezvous.rank == 1:
            Event().wait()
        return super().connect(rendezvous, accelerator, timeout_s=timeout_s)


LIES = [
    kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, Lie) and kind is not Lie
]
for _lie in LIES:
    _name = f"{_lie.__name__}Backend"
    globals()[_name] = type(_name, (BrokenBackend,), {"lie": _lie, "__module__": __name__})

NAMED = named(globals(), CommBackend)


def backend_name(kind: type) -> str:
    """The name of the plugin whose communicators tell the lie `kind`, or which is itself `kind`."""
    return next(name for name, plugin in NAMED.items() if kind in (plugin, plugin.lie))
