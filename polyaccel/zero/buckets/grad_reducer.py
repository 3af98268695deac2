"""Backward passes of one rank: their gradients, bucket by bucket, and the reductions that they launch.

[Note: Launch order of collectives]
Collectives must be launched in the same order on every rank. Where parameters are replicated, a backward pass launches
nothing but reductions, and bucket order is that order. Where they are sharded, gathers come in between, and the arrival
of gradients does not order them: a rank whose data missed an expert never sees its gradients. So there the frontend
says when a bucket has had its time on this rank (`Unsharder.release`), and it is launched where the schedule that the
ranks follow has it ([Note: Schedule of unshard events]); what comes later on some rank is late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Protocol

from polyaccel.core.buffer import Buffer
from polyaccel.errors import InvariantError, PolyaccelError, ShardingError
from polyaccel.zero.buckets.grad_accumulator import GradientWriter
from polyaccel.zero.buckets.gradients import GradientBucket
from polyaccel.zero.buckets.host_gradient import Measured
from polyaccel.zero.buckets.user_grad_edits import UserGradEdits
from polyaccel.zero.plan.bucket_plan import StepPlan
from polyaccel.zero.plan.policy import Placement
from polyaccel.zero.plan.pool import InFlight
from polyaccel.zero.resources import Staging, StepResources


class TrainingState(Enum):
    """What the backward pass under way does with gradients."""

    IDLE = "no pass is under way"
    ACCUMULATING = "they stay on this rank"
    REDUCING_IN_ORDER = "a bucket is launched when it and all before it are ready, the rest at the end"
    REDUCING_ON_RELEASE = "a bucket is launched when the frontend releases it, the rest at the end"


class GradsState(Enum):
    """Whether an update may use the gradients that are held."""

    COMPLETE = "every gradient of the passes is reduced, or its reduction launched"
    UNREDUCED = "the last pass kept its gradients on this rank"
    INCOMPLETE = "a pass or an update failed; nothing but `discard` changes that"


_REDUCING = TrainingState.REDUCING_IN_ORDER, TrainingState.REDUCING_ON_RELEASE


class PassMeter(Protocol):
    """Measures gradients of backward passes."""

    def count_pass(self, held: Sequence[Sequence[Buffer]]) -> None:
        """A pass has ended; `held` has what is not reduced yet, by bucket."""

    def forget(self) -> None:
        """All gradients were forgotten."""


class GradReducer:
    """The gradients of all trained buckets on this rank, and the backward pass under way.

    `gathers`: the pass gathers parameters too, so that reductions wait to be released. `waiting` is entered around
    waits for other ranks. The layout's order is the order in which gradients are expected.
    """

    def __init__(
        self,
        plan: StepPlan,
        parts: StepResources,
        staging: Staging,
        waiting: Callable[[], AbstractContextManager[object]],
        *,
        gathers: bool,
    ) -> None:
        self._is_sharded = plan.zero.grads is Placement.SHARDED
        self._gathers = gathers
        self._waiting = waiting
        self._in_flight: InFlight[Buffer] = InFlight(parts.communicators.world.allocate, plan.policy.reduction)
        self.pool = self._in_flight.pool
        """What reductions borrow full buffers from."""
        measured = Measured(plan.layout, parts.accelerator) if plan.policy.needs_norm else None
        self.buckets = [
            GradientBucket(each, plan.policy.reduction, parts, self.pool, staging, measured) for each in plan.trained
        ]
        """The trained buckets' gradients, in layout order."""
        self._by_index = {gradients.bucket.index: gradients for gradients in self.buckets}
        self._by_fqn = {
            slot.param.fqn: (gradients, index)
            for gradients in self.buckets
            for index, slot in enumerate(gradients.bucket.slots)
        }
        self._next_launch = 0
        self._state = TrainingState.IDLE
        self._grads = GradsState.COMPLETE
        self.user_edits = UserGradEdits()
        """What user code on this rank did to gradients since the last update."""
        self.meter: PassMeter | None = None
        """Is shown every backward pass."""
        self.passes = 0
        """How many backward passes have begun."""

    @property
    def in_backward(self) -> bool:
        return self._state is not TrainingState.IDLE

    @property
    def holds_gradients(self) -> bool:
        """Whether there are gradients, or a pass has begun, that no update has used yet."""
        return self.in_backward or any(gradients.has_content for gradients in self.buckets)

    def begin_backward(
        self, *, reduce: bool, names: Collection[str] | None = None, waits_for_end: bool = False
    ) -> None:
        """A backward pass starts. `reduce`: its gradients, and those accumulated before, may be reduced. `names`: the
        parameters that may get one in it (None: any); where every pass reduces, buckets without them are left alone,
        on all ranks. `waits_for_end`: replicated parameters' reductions are launched when the pass ends.

        `ZeroPolicy.reduces_pass` says which passes of an accumulation do. A pass that did not end leaves the gradients
        incomplete.
        """
        if self.in_backward:
            self._grads = GradsState.INCOMPLETE
        elif self._grads is not GradsState.INCOMPLETE:
            self._grads = GradsState.COMPLETE if reduce else GradsState.UNREDUCED
        if not reduce:
            self._state = TrainingState.ACCUMULATING
        elif waits_for_end or self._gathers:
            self._state = TrainingState.REDUCING_ON_RELEASE
        else:
            self._state = TrainingState.REDUCING_IN_ORDER
        self._next_launch = 0
        self.passes += 1
        self.user_edits.shown.clear()
        expected = None
        if names is not None and reduce and self._is_sharded:
            expected = {self._by_fqn[fqn][0] for fqn in names if fqn in self._by_fqn}
        for gradients in self.buckets:
            gradients.begin_backward(expects_grads=expected is None or gradients in expected)

    def takes_rows(self, fqn: str) -> bool:
        """Whether gradients of a parameter travel as rows."""
        return self._by_fqn[fqn][0].row_exchange is not None

    def add_gradient(self, fqn: str, gradient: Buffer | GradientWriter, rows: Buffer | None = None) -> None:
        """Add a flat gradient and launch complete buckets; the caller may free it. Raises outside a pass. `rows`: the
        numbers of the rows in which it is not zero, where `takes_rows`; None: all."""
        state = self._state
        if state is TrainingState.IDLE:
            raise InvariantError(f"the gradient of {fqn!r} came outside of a backward pass", value=fqn)
        bucket, index = self._by_fqn[fqn]
        reducing = state is not TrainingState.ACCUMULATING
        if reducing and bucket.needs_staging():
            self._in_flight.make_room()
        bucket.add(index, gradient, rows, reducing=reducing)
        if state is TrainingState.REDUCING_IN_ORDER:
            self._launch_ready()

    def can_launch(self, index: int) -> bool:
        """Whether the reduction of a bucket is still to be launched in this pass; frozen ones have none."""
        gradients = self._by_index.get(index)
        return self._state in _REDUCING and gradients is not None and not gradients.is_launched

    def launch(self, index: int) -> None:
        """Launch the reduction of a bucket, if it is still to be launched."""
        if self.can_launch(index):
            self._launch(self._by_index[index])

    def end_backward(self, *, counts: bool = True) -> None:
        """The backward pass is over: launch the remaining buckets, with zeros for gradients that did not appear.
        `counts`: it was a pass of the model."""
        if self._state in _REDUCING:
            for gradients in self.buckets:
                if not gradients.is_launched:
                    self._launch(gradients)
        if counts and self.meter is not None:
            self.meter.count_pass([gradients.sums.parts() for gradients in self.buckets])
        for gradients in self.buckets:
            gradients.end_backward()
        self._state = TrainingState.IDLE

    def abort_backward(self) -> None:
        """Launch nothing more: the pass failed, and gradients must be discarded."""
        self._state, self._grads = TrainingState.IDLE, GradsState.INCOMPLETE

    def _launch_ready(self) -> None:
        while self._next_launch < len(self.buckets) and self.buckets[self._next_launch].is_ready:
            if not self.buckets[self._next_launch].is_launched:
                self._launch(self.buckets[self._next_launch])
            self._next_launch += 1

    def _launch(self, gradients: GradientBucket) -> None:
        if gradients.needs_staging() or gradients.needs_recasting():
            self._in_flight.make_room()
        gradients.launch()
        self._in_flight.add(gradients)

    def finish_reductions(self) -> None:
        """Wait until every reduction that was launched has settled."""
        with self._waiting():
            for gradients in self.buckets:
                gradients.finish()
        self._in_flight.clear()

    def gradients_of(self, fqn: str) -> tuple[GradientBucket, int]:
        """The bucket with the gradient of a parameter, and its slot there. Raises ShardingError for a frozen one."""
        if fqn not in self._by_fqn:
            raise ShardingError(
                f"parameter {fqn!r} is not trained, so it has no gradient", hint="pass a trained one", value=fqn
            )
        return self._by_fqn[fqn]

    def require_complete(self, fqn: str) -> None:
        """Raise PolyaccelError inside a pass and after a failed one, where a gradient is incomplete."""
        if self.in_backward:
            raise PolyaccelError(
                f"the gradient of {fqn!r} was looked for inside a backward pass, which takes it as it appears",
                hint="use parameter.register_hook, which is given the gradient and may return another, or look after "
                "the backward pass",
                value=fqn,
            )
        if self._grads is GradsState.INCOMPLETE:
            raise _incomplete()

    # The update.

    def prepare_update(self) -> None:
        """Reduce what earlier passes accumulated. Raises PolyaccelError inside a pass or after a failure."""
        if self.in_backward or self._grads is GradsState.INCOMPLETE:
            raise _incomplete()
        if self._grads is GradsState.UNREDUCED:
            self.begin_backward(reduce=True)
            self.end_backward(counts=False)

    def mark_incomplete(self) -> None:
        """The gradients are being used: should that fail, they are of no use."""
        self._grads = GradsState.INCOMPLETE

    def mark_complete(self) -> None:
        """They were only looked at, and are as they were."""
        self._grads = GradsState.COMPLETE

    def discard(self) -> None:
        """Forget all gradients, reduced or not, and the pass that they come from if it did not end."""
        for gradients in self.buckets:
            gradients.discard()
        self.user_edits.forget()
        if self.meter is not None:
            self.meter.forget()
        self._state, self._grads = TrainingState.IDLE, GradsState.COMPLETE

    def close(self) -> None:
        """Release all buffers."""
        self.buckets.clear()
        self._by_index.clear()
        self._by_fqn.clear()


def _incomplete() -> PolyaccelError:
    return PolyaccelError(
        "the gradients are incomplete: a reduction or a backward pass failed",
        hint="call engine.zero_grad() and start over",
    )
