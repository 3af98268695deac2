"""The ZeRO step on flat buffers: bind parameters to buckets, reduce gradients as they appear, update slices, publish.

Every frontend drives this same object and keeps only what its framework must do: say what the parameters are, see them
in the buckets (`ParamBuckets`), hand over gradients (`add_gradient`), and mark where a pass begins and ends. Nothing
here sees a tensor, an array or a device's name; stages are values of `ZeroPolicy`, asked when buffers are allocated.

[Note: Launch order of collectives]
Collectives must be launched in the same order on every rank. Where parameters are replicated, a backward pass launches
nothing but reductions, and bucket order is that order. Where they are sharded, gathers come in between, and the arrival
of gradients is no guide: a rank whose data missed an expert never sees its gradients. So there the frontend says when a
bucket has had its time on this rank (`release`), and it is launched where the schedule that the ranks follow has it
([Note: Schedule of unshard events]); what comes later on some rank is late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.errors import InvariantError, PolyaccelError, ShardingError
from polyaccel.zero.buckets.gather_coordinator import GatherCoordinator
from polyaccel.zero.buckets.grad_accumulator import GradientWriter
from polyaccel.zero.buckets.gradients import GradientBucket
from polyaccel.zero.buckets.params import ParamBuckets, ParamListener
from polyaccel.zero.buckets.user_writes import sync_user_writes
from polyaccel.zero.memory import StepMemory
from polyaccel.zero.plan.bucket_plan import StepPlan
from polyaccel.zero.plan.layout import Slot
from polyaccel.zero.plan.policy import Placement
from polyaccel.zero.plan.pool import InFlight
from polyaccel.zero.resources import Staging, StepResources
from polyaccel.zero.update.grad_norm import Flags, GradNormReducer, ReadyGrads
from polyaccel.zero.update.optimizer_step import OptimizerState, OptimizerStep, StepResult
from polyaccel.zero.update.optimizers import Group, Shard, SliceOptimizer
from polyaccel.zero.update.user_grad_edits import UserGradEdits

WaitingPhase = Literal["reduce", "publish"]


class ZeroEngine:
    """Parameters, gradients, optimizer states and their exchange on one rank, in the buffers of `plan`.

    `owner` has the parameters' original values, in their original precision: master weights start from those, not from
    what the training precision rounds them to. Rank 0's values are broadcast, and `owner` is notified where each
    parameter stands from then on. `groups` has the hyperparameters of each optimizer group, `timed` is entered around
    waits for other ranks. The layout's order is the order in which gradients are expected. Raises what accelerator,
    communicators and tiers raise; tiers and near ranks of `parts` are closed with the step.
    """

    def __init__(
        self,
        plan: StepPlan,
        parts: StepResources,
        owner: ParamListener,
        optimizer: SliceOptimizer | None,
        groups: Sequence[Group],
        timed: Callable[[WaitingPhase], AbstractContextManager[object]] = lambda phase: nullcontext(),
    ) -> None:
        communicator = parts.communicators.world
        if plan.layout.world_size != communicator.world_size:
            raise InvariantError(
                f"layout for {plan.layout.world_size} ranks, communicator of {communicator.world_size}",
                value=plan.layout.world_size,
            )
        self.plan = plan
        self.layout = plan.layout
        self.policy = plan.zero
        self.optimizer = optimizer
        self.communicator = communicator
        self.accelerator = parts.accelerator
        self._communicators = parts.communicators
        self._timed = timed
        self._owner = owner
        self.params = ParamBuckets(plan, parts, owner, lambda: self._timed("publish"))
        self.uses = GatherCoordinator(
            self.params.gathering,
            communicator,
            self._can_launch,
            self._launch_released,
            is_active=self.params.is_any_sharded,
            warn=plan.policy.gathering.warn_of_deviations,
        )
        """What this rank uses of sharded buckets; frontends report it."""
        self._staging = Staging(parts.accelerator.new_stream())
        self._in_flight: InFlight[Buffer] = InFlight(communicator.allocate, plan.policy.reduction)
        self._gradients = [
            GradientBucket(each, plan.policy.reduction, parts, self._in_flight.pool, self._staging)
            for each in plan.trained
        ]
        self._positions = {gradients.bucket.index: at for at, gradients in enumerate(self._gradients)}
        self._by_fqn = {
            slot.param.fqn: (position, index)
            for position, gradients in enumerate(self._gradients)
            for index, slot in enumerate(gradients.bucket.slots)
        }
        self._states = OptimizerState(plan, parts.tiers, self.params, optimizer, groups, self._staging)
        kept = self.params, self._gradients, self._states, self._in_flight.pool, self._staging
        self.memory = StepMemory(plan, *kept)
        self._facts = GradNormReducer(
            plan.layout, self._gradients, communicator, parts.accelerator, parts.communicators.model_parallel_group
        )
        self._update: OptimizerStep | None = None
        if optimizer is not None:
            self._update = OptimizerStep(
                *(plan, parts, optimizer, self._states, self.params, self._facts), lambda: self._timed("reduce")
            )
        self._in_backward = False
        self._reducing = False
        self._waits_for_end = False
        self._has_unreduced = False
        """Gradients accumulated in a pass that did not reduce, and no reducing pass has followed."""
        self._is_incomplete = False
        """A pass did not come to its end, and its gradients were not discarded."""
        self._next_launch = 0
        self._half = ""
        """What failed in the middle, an update apart, and left parameters and states of two steps."""
        self.passes = 0
        """How many backward passes have begun."""

    @property
    def model_parallel_group(self) -> Communicator | None:
        """Process group of the other pipeline stages, or None without pipeline parallelism."""
        return self._communicators.model_parallel_group

    def holders(self, fqn: str) -> Communicator:
        """The communicator of the ranks that hold the same elements of a parameter as this one."""
        return self._communicators.of(self.layout.locate(fqn)[0]).exact

    @property
    def steps(self) -> dict[str, int]:
        """How many updates each trained parameter has had."""
        return self.params.steps

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards that this rank updates, in layout order."""
        return self._states.shards

    # The backward pass.

    @property
    def in_backward(self) -> bool:
        return self._in_backward

    @property
    def holds_gradients(self) -> bool:
        """Whether there are gradients, or a pass has begun, that no update has used yet."""
        return self._in_backward or any(gradients.has_content for gradients in self._gradients)

    def begin_backward(
        self, *, reduce: bool, names: Collection[str] | None = None, waits_for_end: bool = False
    ) -> None:
        """A backward pass starts. `reduce`: its gradients, and those accumulated before, may be reduced. `names`: the
        parameters that may get one in it (None: any); where every pass reduces, buckets without them are left alone,
        on all ranks. `waits_for_end`: replicated parameters' reductions are launched when the pass ends.

        `ZeroPolicy.reduces_pass` says which passes of an accumulation do. Raises PolyaccelError after an update that
        failed half-way (`require_consistent`).
        """
        self.require_consistent()
        self._is_incomplete |= self._in_backward
        self._in_backward, self._reducing, self._next_launch = True, reduce, 0
        self._waits_for_end = waits_for_end
        self._has_unreduced = not reduce
        self.passes += 1
        self.user_grad_edits.shown.clear()
        is_partial = names is not None and reduce and self.policy.grads is Placement.SHARDED
        concerned = {self._by_fqn[fqn][0] for fqn in names or () if fqn in self._by_fqn} if is_partial else None
        for position, gradients in enumerate(self._gradients):
            gradients.begin_backward(expects_grads=concerned is None or position in concerned)

    def add_gradient(self, fqn: str, gradient: Buffer | GradientWriter) -> None:
        """Take over a parameter's gradient, flat, or let it be written into its bucket; the caller may free it at once.
        Launches the buckets that it completes."""
        position, index = self._by_fqn[fqn]
        bucket = self._gradients[position]
        if self._reducing and bucket.needs_staging():
            self._in_flight.make_room()
        bucket.add(index, gradient, reducing=self._reducing)
        if self._reducing and not self._waits_for_end and not self.params.is_any_sharded:
            self._launch_ready()

    def release(self, indices: Iterable[int]) -> None:
        """No more gradients come for these buckets on this rank in this pass. See
        [Note: Launch order of collectives]."""
        for index in indices:
            self.uses.release(index)

    def _can_launch(self, index: int) -> bool:
        """Whether the reduction of a bucket is still to be launched in this pass; frozen ones have none."""
        position = self._positions.get(index)
        return self._reducing and position is not None and not self._gradients[position].is_launched

    def _launch_released(self, index: int) -> None:
        if self._can_launch(index):
            self._launch(self._gradients[self._positions[index]])

    def end_backward(self) -> None:
        """The backward pass is over: launch the remaining buckets, with zeros for gradients that did not appear."""
        if self._reducing:
            for gradients in self._gradients:
                if not gradients.is_launched:
                    self._launch(gradients)
        for gradients in self._gradients:
            gradients.end_backward()
        self._in_backward = self._reducing = False

    def abort_backward(self) -> None:
        """The backward pass failed: launch nothing more. The gradients are incomplete; discard them before
        continuing."""
        self._in_backward = self._reducing = False
        self._is_incomplete = True

    def _launch_ready(self) -> None:
        while self._next_launch < len(self._gradients) and self._gradients[self._next_launch].is_ready:
            if not self._gradients[self._next_launch].is_launched:
                self._launch(self._gradients[self._next_launch])
            self._next_launch += 1

    def _launch(self, gradients: GradientBucket) -> None:
        if gradients.needs_staging() or gradients.needs_recasting():
            self._in_flight.make_room()
        gradients.launch()
        self._in_flight.add(gradients)

    def finish_reductions(self) -> None:
        """Wait until every reduction that was launched has settled."""
        with self._timed("reduce"):
            for gradients in self._gradients:
                gradients.finish()
        self._in_flight.clear()

    def gradients_of(self, fqn: str) -> tuple[GradientBucket, int]:
        """The bucket with the gradient of a parameter, and its slot there. Raises ShardingError for a frozen one."""
        if fqn not in self._by_fqn:
            raise ShardingError(
                f"parameter {fqn!r} is not trained, so it has no gradient", hint="pass a trained one", value=fqn
            )
        position, index = self._by_fqn[fqn]
        return self._gradients[position], index

    @property
    def user_grad_edits(self) -> UserGradEdits:
        """What user code on this rank did to gradients since the last update."""
        return self._facts.user_grad_edits

    def require_complete(self, fqn: str) -> None:
        """Raise PolyaccelError where the gradient of a parameter is not there to see: inside a backward pass, and after
        one that failed."""
        if self._in_backward:
            raise PolyaccelError(
                f"the gradient of {fqn!r} was looked for inside a backward pass, which takes it as it appears",
                hint="use parameter.register_hook, which is given the gradient and may return another, or look after "
                "the backward pass",
                value=fqn,
            )
        if self._is_incomplete:
            raise _incomplete()

    def gradient_buckets(self) -> Sequence[GradientBucket]:
        """The trainable buckets' gradients, in layout order."""
        return self._gradients

    def discard_gradients(self) -> None:
        """Forget all gradients, reduced or not, and the pass that they come from if it did not end."""
        for gradients in self._gradients:
            gradients.discard()
        self.user_grad_edits.forget()
        self._in_backward = self._reducing = self._has_unreduced = self._is_incomplete = False

    # The update.

    def update(self, groups: Sequence[Group], loss_scale: float = 1.0) -> StepResult:
        """Agree with the other ranks, update this rank's slices, publish the parameters, forget the gradients.

        Collective. `loss_scale` is the factor that the gradients were multiplied with. Nothing changes on an overflow
        that is skipped. Raises PolyaccelError after a pass that failed, unless its gradients were discarded, after an
        update that failed half-way (`require_consistent`), and while sharded parameters are held; and ShardingError, on
        all ranks, where parameters were changed by hand in ways that cannot count (`sync_user_writes`).
        """
        if self._update is None:
            raise InvariantError("update was called on a step without an optimizer")
        self.require_consistent()
        self.uses.require_idle()
        if self._in_backward or self._is_incomplete:
            raise _incomplete()
        if self._has_unreduced:
            self.begin_backward(reduce=True)
            self.end_backward()
        changed = self._owner.changed_params()
        flags = Flags(has_changes=bool(changed), has_deviated=self.uses.has_deviated)
        self._is_incomplete = True  # should anything fail before they were used
        if self._update.is_early:
            arrivals, norm = self._facts.agree_on_arrivals(flags), None
        else:
            self.finish_reductions()
            arrivals, norm = self._facts.all_reduce_norm_and_flags(loss_scale, flags, measure=self._update.measures)
        self._is_incomplete = False
        if self.plan.policy.require_all and len(arrivals.params) < len(self.steps):
            raise _unused(sorted(self.steps.keys() - arrivals.params))
        if arrivals.flags.has_changes:
            sync_user_writes(self.params, self._owner, self.communicator, changed)
        self._is_incomplete = True
        self.params.wait_all_gathers()
        self.uses.end_step(learn=arrivals.flags.has_deviated)
        if norm is not None and norm.overflow and self.plan.policy.skip_overflow:
            self.discard_gradients()
            return StepResult(False, norm.norm, norm.norm, norm.first_nonfinite_param)
        return self._update.apply(groups, arrivals, norm, loss_scale, self.discard_gradients)

    def adopt_changes(self) -> None:
        """Take over what users wrote into parameters since the last update. Collective. Raises ShardingError on all
        ranks where they wrote different values."""
        sync_user_writes(self.params, self._owner, self.communicator, self._owner.changed_params())

    def agree_on_arrivals(self) -> ReadyGrads:
        """Which parameters have a gradient on some rank; late ones are reduced. Collective."""
        return self._facts.agree_on_arrivals()

    def require_consistent(self) -> None:
        """Raise PolyaccelError where an update or a load failed half-way: parameters and states belong to two steps."""
        if self._half:
            raise PolyaccelError(
                f"{self._half} failed in the middle: parameters and optimizer states belong to two steps",
                hint="load a checkpoint, with its optimizer states",
                value=self._half,
            )
        if self._update is not None:
            self._update.require_consistent()

    def mark_inconsistent(self, what: str) -> None:
        """`what` failed in the middle: nothing is trained or saved (`require_consistent`) until `mark_consistent`."""
        self._half = what

    def mark_consistent(self) -> None:
        """Clear the inconsistent flag after a complete checkpoint load."""
        self._half = ""
        if self._update is not None:
            self._update.mark_consistent()

    # Owned state, for checkpoints.

    def local_shards(self) -> Iterator[tuple[Slot, str, int, Buffer]]:
        """The pieces that this rank saves, in global coordinates: (slot, kind, start, buffer); over all ranks each
        element once.

        Kind `param` is the parameter in the best precision there is, the others are optimizer states. Raises
        PolyaccelError after an update that failed half-way.
        """
        self.require_consistent()
        for place in self.params:
            shard = self._states.get(place.bucket.index)
            for piece in place.bucket.slices(self._communicators.of(place.bucket).exact.rank):
                _, slot = self.layout.locate(piece.fqn)
                offset = slot.offset + piece.start - place.origin
                yield slot, "param", piece.start, place.master.view(offset, piece.length)
                for name, state in (shard.states if shard else {}).items():
                    yield slot, name, piece.start, state.view(offset, piece.length)

    def shards_to_load(self) -> Iterator[tuple[Slot, str, int, Buffer]]:
        """The pieces that this rank must load to continue, in global coordinates: all of `master` and of the optimizer
        states."""
        for place in self.params:
            shard = self._states.get(place.bucket.index)
            for piece in place.slices():
                _, slot = self.layout.locate(piece.fqn)
                yield slot, "param", piece.start, place.master.view(piece.shard_offset, piece.length)
                for name, state in (shard.states if shard else {}).items():
                    yield slot, name, piece.start, state.view(piece.shard_offset, piece.length)

    def trim(self) -> None:
        """Give back memory that only waits to be used again."""
        self._in_flight.pool.trim()
        self.params.gathering.trim()

    def close(self) -> None:
        """Release all buffers. Views that frontends hold keep their memory alive."""
        self.finish_reductions()
        self.params.close()
        self._gradients.clear()
        self._staging.clear()
        self._states.close()
        self._communicators.close()


def _incomplete() -> PolyaccelError:
    return PolyaccelError(
        "the gradients are incomplete: a reduction or a backward pass failed",
        hint="call engine.zero_grad() and start over",
    )


def _unused(names: Sequence[str]) -> ShardingError:
    return ShardingError(
        f"no rank had a gradient for {len(names)} trained parameters: {', '.join(names[:8])}",
        hint='freeze them, use them, or set "zero_optimization": {"ignore_unused_parameters": true}',
        value=names,
    )
