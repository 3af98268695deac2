"""What all ranks must know of each other's gradients before anybody branches.

[Note: One small all-reduce]
At the end of a step each rank knows for each parameter whether it got a gradient here, and for each bucket whether
gradients came too late for its reduction. That is known without any gradient's value, so it can be agreed on while
reductions are under way. The squared norm of each parameter's slice here is known when all of them have ended; overflow
and the culprit's name follow from it. Both travel as vectors of float64, through one small all-reduce where an update
must know the norm before it begins and through one each where it need not. What ranks decide follows from those vectors
alone, so they cannot disagree.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import CallInfo, Communicator
from polyaccel.zero.gradients import GradientBucket
from polyaccel.zero.layout import ShardLayout
from polyaccel.zero.norms import GradientNorm, SquareSums, allocate_sums, read_sums, write_sums


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`touched` holds the parameters with a gradient on some rank, `late_buckets` where one came late on some rank."""

    touched: frozenset[str]
    late_buckets: tuple[int, ...]


class Agreement:
    """The exchange of what ranks know of the gradients in `buckets`. Every method is collective."""

    def __init__(
        self,
        layout: ShardLayout,
        buckets: Sequence[GradientBucket],
        communicator: Communicator,
        accelerator: Accelerator,
    ) -> None:
        self._layout = layout
        self._buckets = buckets
        self._communicator = communicator
        self._accelerator = accelerator

    def on_arrivals(self) -> Arrivals:
        """Waits for no gradient but late ones, which are reduced on the way."""
        arrivals = self._interpret(self._exchange(self._flags(), "arrivals"))
        self._reduce_late(arrivals)
        return arrivals

    def on_norm(self, sums: SquareSums, loss_scale: float) -> GradientNorm:
        """`sums` has the gradients of all buckets."""
        return GradientNorm.of(self._exchange(sums.read(), "norms"), self._layout, loss_scale)

    def on_everything(self, loss_scale: float, *, measure: bool) -> tuple[Arrivals, GradientNorm]:
        """The same at once, where all reductions have ended. Unless `measure`, the norm is 0."""
        count = len(self._layout.params)
        values = self._exchange(self._sums(measure).read() + self._flags(), "norms and arrivals")
        arrivals = self._interpret(values[count:])
        if arrivals.late_buckets:
            self._reduce_late(arrivals)
            return arrivals, self.on_norm(self._sums(measure), loss_scale)
        return arrivals, GradientNorm.of(values[:count], self._layout, loss_scale)

    def new_sums(self) -> SquareSums:
        """Sums for `add_squares` and `on_norm`."""
        return SquareSums(len(self._layout.params))

    def add_squares(self, sums: SquareSums, gradients: GradientBucket) -> None:
        """Add the squared norms of this rank's slices of a reduced gradient, if there is one."""
        if not gradients.holds_result:
            return
        position = self._layout.position
        sums.add(gradients.compute, [(position[fqn], part) for fqn, part in gradients.own_slices])

    def _sums(self, measure: bool) -> SquareSums:
        sums = self.new_sums()
        for gradients in self._buckets if measure else ():
            self.add_squares(sums, gradients)
        return sums

    def _flags(self) -> array[float]:
        """How often each parameter got a gradient, then whether each bucket has late ones."""
        count = len(self._layout.params)
        flags = array("d", bytes(8 * (count + len(self._buckets))))
        for index, gradients in enumerate(self._buckets):
            for slot, touched in zip(gradients.bucket.slots, gradients.touched, strict=True):
                flags[self._layout.position[slot.param.fqn]] = touched
            flags[count + index] = gradients.has_late
        return flags

    def _interpret(self, flags: array[float]) -> Arrivals:
        names = [param.fqn for param in self._layout.params]
        late = flags[len(names) :]
        return Arrivals(
            frozenset(name for name, arrived in zip(names, flags, strict=False) if arrived),
            tuple(index for index, flag in enumerate(late) if flag),
        )

    def _reduce_late(self, arrivals: Arrivals) -> None:
        for index in arrivals.late_buckets:
            self._buckets[index].reduce_late()

    def _exchange(self, values: array[float], label: str) -> array[float]:
        """The sums over all ranks. A single rank asks nobody, and so does not wait for its device either."""
        if self._communicator.world_size == 1:
            return values
        sums = allocate_sums(self._accelerator, self._communicator, len(values))
        write_sums(sums, values)
        self._communicator.all_reduce(sums, info=CallInfo(label))
        return read_sums(sums)
