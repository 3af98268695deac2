"""Sharded parameters and their gradients while a program runs: the functions that its calls run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.jax.program.calls import CallTable
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.plan.gather_schedule import SyncPoint


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of the user's params: its place in tree order, and the engine's names of it or of its layers.

    `is_whole`: this rank has all of it for good, in memory that JAX sees; nothing is gathered.
    """

    index: int
    fqn: str
    shape: tuple[int, ...]
    dtype: DType
    is_trained: bool
    is_whole: bool
    is_stacked: bool
    names: tuple[str, ...]


class ShardedParams:
    """The parameters of `zero`, copied into programs unit by unit, and gradients taken out of them.

    [Note: Gradient completion count]
    A bucket's gradients are complete, and reduced, when every unit that uses one of its parameters has run backward.
    How many do is counted when a program is traced, so that each rank has the same counts.
    """

    def __init__(self, zero: ZeroEngine, accelerator: Accelerator) -> None:
        self._zero = zero
        self.rank = zero.communicator.rank
        self.calls = CallTable(accelerator)
        self._left: Counter[int] = Counter()

    def begin(self, *, is_training: bool) -> None:
        """Get ready for a program that is about to run."""
        self._zero.unsharder.learns = is_training
        self.calls.failure = None
        self._left.clear()

    def end(self) -> None:
        """The program has run to its end on this rank. Returns when it has on all of them."""
        unsharder = self._zero.unsharder
        unsharder.sync(SyncPoint.PROGRAM if unsharder.learns else SyncPoint.EVALUATION)

    def raise_failure(self, error: BaseException) -> NoReturn:
        """Raise the error of the call that failed, if XLA raised `error` because of it; else `error`."""
        self._zero.unsharder.abandon()
        failure, self.calls.failure = self.calls.failure, None
        if failure is None:
            raise error
        raise failure from error

    def fetch(self, names: Sequence[str], outs: Sequence[Buffer]) -> None:
        """Copy whole parameters to `outs`. Collective where they are sharded."""
        params = self._zero.params
        places = [params.locate(name) for name in names]
        held: list[int] = []
        try:
            for index in dict.fromkeys(place.bucket.index for place, _ in places if place.full is None):
                self._zero.unsharder.unshard(index)
                held.append(index)
            for (place, slot), out in zip(places, outs, strict=True):
                out.copy_from(params.full(place.bucket.index).view(slot.offset, slot.param.numel))
        finally:
            for index in held:
                self._zero.unsharder.reshard(index)

    def reduce(self, names: Sequence[str], gradients: Sequence[Buffer], uses: Counter[int]) -> None:
        """Add gradients and reduce the buckets that are complete. See [Note: Gradient completion count]."""
        for name, gradient in zip(names, gradients, strict=True):
            self._zero.reducer.add_gradient(name, gradient)
        for index in self.buckets(names):
            self._left[index] += 1
            if self._left[index] == uses[index]:
                self._zero.unsharder.release(index)

    def buckets(self, names: Sequence[str]) -> list[int]:
        """The buckets of these parameters, each once."""
        return list(dict.fromkeys(self._zero.layout.locate(name)[0].index for name in names))
