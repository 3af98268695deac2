"""The ZeRO step on flat buffers: bind parameters to buckets, reduce gradients as they appear, update slices, publish.

Every frontend drives this same object and keeps only what its framework must do: say what the parameters are, see them
in the buckets (`ParamBuckets`), hand over gradients (`GradReducer`), and mark where a pass begins and ends. Nothing
here sees a tensor, an array or a device's name; stages are values of `ZeroPolicy`, asked when buffers are allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal

from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.errors import InvariantError, PolyaccelError, ShardingError
from polyaccel.zero.buckets.grad_reducer import GradReducer
from polyaccel.zero.buckets.param_listener import ParamListener
from polyaccel.zero.buckets.params import ParamBuckets
from polyaccel.zero.buckets.unsharder import Unsharder
from polyaccel.zero.buckets.user_writes import UserWrites
from polyaccel.zero.plan.bucket_plan import PlannedBuffer, StepPlan, TrainedBucketPlan
from polyaccel.zero.plan.layout import Slot
from polyaccel.zero.plan.memory import Purpose, in_words, memory_by_purpose
from polyaccel.zero.plan.placement import Place
from polyaccel.zero.resources import Staging, StepResources
from polyaccel.zero.update.block_states import memory_of
from polyaccel.zero.update.consistency import Consistency
from polyaccel.zero.update.global_norm import GradientNorm
from polyaccel.zero.update.grad_norm import Flags, GradNormReducer, ReadyGrads
from polyaccel.zero.update.noise_scale import NoiseMeter
from polyaccel.zero.update.optimizer_step import OptimizerState, OptimizerStep, StepResult
from polyaccel.zero.update.optimizers import Group, Shard, SliceOptimizer
from polyaccel.zero.update.unread_norm import UnreadNorm

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
        self._owner = owner
        self.params = ParamBuckets(plan, parts, owner, partial(timed, "publish"))
        self.user_writes = UserWrites(self.params, owner, communicator)
        self._staging = Staging(parts.accelerator)
        self.reducer = GradReducer(
            plan, parts, self._staging, partial(timed, "reduce"), gathers=self.params.is_any_sharded
        )
        self.unsharder = Unsharder(
            self.params.gathered,
            self.reducer,
            communicator,
            is_active=self.params.is_any_sharded,
            warn=plan.policy.gathering.warn_of_deviations,
            is_fixed=plan.policy.gathering.is_fixed,
            host=parts.communicators.host,
        )
        self._states = OptimizerState(plan, parts, self.params, optimizer, groups, self._staging)
        self.memory = StepMemory(plan, self.params, self.reducer, self._states, self._staging)
        self._facts = GradNormReducer(
            *(plan.layout, self.reducer, communicator, parts.accelerator, self._staging),
            *(parts.communicators.model_parallel_group, parts.communicators.host),
        )
        self.noise: NoiseMeter | None = None
        if plan.policy.noise_decay is not None:
            replicas = plan.layout.mesh.size_of(("data",))
            self.noise = NoiseMeter(self.reducer, parts.accelerator, communicator, replicas, plan.policy.noise_decay)
        self.consistency = Consistency()
        self.before_states_move: list[Callable[[], None]] = []
        """What is called before states are saved or loaded."""
        self.has_averages = False
        """Whether averages are in the place of trained weights."""
        self._update: OptimizerStep | None = None
        if optimizer is not None:
            self._update = OptimizerStep(
                *(plan, parts, optimizer, self._states, self.params, self._facts, self.consistency),
                partial(timed, "reduce"),
            )

    @property
    def model_parallel_group(self) -> Communicator | None:
        """Process group of the other pipeline stages, or None without pipeline parallelism."""
        return self._communicators.model_parallel_group

    def holders(self, fqn: str) -> Communicator:
        """The communicator of the ranks that hold the same elements of a parameter as this one."""
        return self._communicators.get_groups(self.layout.locate(fqn)[0]).exact

    @property
    def steps(self) -> dict[str, int]:
        """How many updates each trained parameter has had."""
        return self.params.steps

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards that this rank updates, in layout order."""
        return self._states.shards

    # Gradients.

    @property
    def holds_gradients(self) -> bool:
        """Whether there are gradients, or a pass has begun, that no update has used yet."""
        return self.reducer.holds_gradients

    def begin_backward(
        self, *, reduce: bool, names: Collection[str] | None = None, waits_for_end: bool = False
    ) -> None:
        """A backward pass starts; see `GradReducer.begin_backward`. Raises PolyaccelError after an update that failed
        half-way (`consistency`)."""
        self.require_trained_weights()
        self.reducer.begin_backward(reduce=reduce, names=names, waits_for_end=waits_for_end)

    def require_trained_weights(self) -> None:
        """Raise PolyaccelError where parameters are averages for a while, or those of no one step."""
        self.consistency.require()
        if self.has_averages:
            raise PolyaccelError(
                "parameters are averaged weights now, which are neither trained nor saved",
                hint="leave the block of engine.averaged_weights() first",
            )

    def forget_errors(self) -> None:
        """Let errors of quantised gradients begin at zero: gradients have another scale, or were not finite."""
        self._communicators.forget_errors()

    def discard_gradients(self) -> None:
        """Forget all gradients, reduced or not, and the pass that they come from if it did not end."""
        self.reducer.discard()

    # The update.

    def update(self, groups: Sequence[Group], loss_scale: float = 1.0) -> StepResult:
        """Agree with the other ranks, update this rank's slices, publish the parameters, forget the gradients.

        Collective. `loss_scale` is the factor that the gradients were multiplied with. Nothing changes on an overflow
        that is skipped. Raises PolyaccelError after a pass that failed, unless its gradients were discarded, after an
        update that failed half-way (`consistency`), and while sharded parameters are held; and ShardingError, on
        all ranks, where parameters were changed by hand in ways that cannot count (`UserWrites.sync`).
        """
        if self._update is None:
            raise InvariantError("update was called on a step without an optimizer")
        self.require_trained_weights()
        self.unsharder.require_idle()
        self.reducer.prepare_update()
        changed = self._owner.changed_params()
        flags = Flags(has_changes=bool(changed), has_deviated=self.unsharder.has_deviated)
        self.reducer.mark_incomplete()  # should anything fail before they were used
        parts = None if self.noise is None else self.noise.take(loss_scale)
        if self._update.is_queued:
            self.reducer.finish_reductions()
            self._states.fetch_gradients(self.reducer)
        norm: GradientNorm | UnreadNorm | None = None
        if self._update.is_early:
            arrivals = self._facts.agree_on_arrivals(flags)
        elif self._update.spares_wait:
            arrivals = self._facts.agree_on_arrivals(flags)
            norm = self._facts.start_norm(loss_scale) if self._update.measures else GradientNorm(0.0, None)
        else:
            self.reducer.finish_reductions()
            arrivals, norm = self._facts.all_reduce_norm_and_flags(loss_scale, flags, measure=self._update.measures)
        self.reducer.mark_complete()
        if arrivals.late_buckets:
            self._states.forget_fetched()
        if self.plan.policy.require_all and len(arrivals.params) < len(self.steps):
            raise _unused(sorted(self.steps.keys() - arrivals.params))
        if arrivals.flags.has_changes:
            self.user_writes.sync(changed)
        self.reducer.mark_incomplete()
        self.params.wait_all_gathers()
        self.unsharder.end_step(learn=arrivals.flags.has_deviated)
        if isinstance(norm, GradientNorm) and norm.overflow and self.plan.policy.skip_overflow:
            self._states.forget_fetched()
            self.discard_gradients()
            self.forget_errors()
            return StepResult(False, norm)
        result = self._update.apply(groups, arrivals, norm, loss_scale, self.discard_gradients)
        if self.noise is None:
            return result
        mean_norm = result.grad_norm if self.plan.policy.reduction.average else result.grad_norm / self.noise.replicas
        return replace(result, noise_ratio=self.noise.ratio(parts, mean_norm))

    def adopt_changes(self) -> None:
        """Take over what users wrote into parameters since the last update. Collective. Raises ShardingError on all
        ranks where they wrote different values."""
        self.user_writes.sync(self._owner.changed_params())

    def agree_on_arrivals(self) -> ReadyGrads:
        """Which parameters have a gradient on some rank; late ones are reduced. Collective."""
        return self._facts.agree_on_arrivals()

    # Owned state, for checkpoints.

    def local_shards(self) -> Iterator[tuple[Slot, str, int, Buffer]]:
        """The pieces that this rank saves, in global coordinates: (slot, kind, start, buffer); over all ranks each
        element once.

        Kind `param` is the parameter in the best precision there is, the others are optimizer states. Raises
        PolyaccelError after an update that failed half-way.
        """
        self.require_trained_weights()
        self._settle()
        for params in self.params:
            shard = self._states.get(params.bucket.index)
            for piece in params.bucket.slices(self._communicators.get_groups(params.bucket).exact.rank):
                _, slot = self.layout.locate(piece.fqn)
                offset = slot.offset + piece.start - params.origin
                yield slot, "param", piece.start, params.master.view(offset, piece.length)
                for name, state in (shard.states if shard else {}).items():
                    yield slot, name, piece.start, state.view(offset, piece.length)

    def shards_to_load(self) -> Iterator[tuple[Slot, str, int, Buffer]]:
        """The pieces that this rank must load to continue, in global coordinates: all of `master` and of the optimizer
        states."""
        self._settle()
        self.params.end_fetches()
        for params in self.params:
            shard = self._states.get(params.bucket.index)
            for piece in params.slices():
                _, slot = self.layout.locate(piece.fqn)
                yield slot, "param", piece.start, params.master.view(piece.shard_offset, piece.length)
                for name, state in (shard.states if shard else {}).items():
                    yield slot, name, piece.start, state.view(piece.shard_offset, piece.length)

    def _settle(self) -> None:
        """Bring states to where a checkpoint has them. Errors of quantised gradients are in none: a run that is saved
        begins with none, as the resumed one does."""
        self.forget_errors()
        for call in self.before_states_move:
            call()

    def trim(self) -> None:
        """Give back memory that only waits to be used again."""
        self.reducer.pool.trim()
        self.params.gathered.trim()

    def close(self) -> None:
        """Release all buffers. Views that frontends hold keep their memory alive."""
        self.reducer.finish_reductions()
        self.params.close()
        self.reducer.close()
        self._staging.clear()
        self._states.close()
        self._communicators.close()


def _unused(names: Sequence[str]) -> ShardingError:
    return ShardingError(
        f"no rank had a gradient for {len(names)} trained parameters: {', '.join(names[:8])}",
        hint='freeze them, use them, or set "zero_optimization": {"ignore_unused_parameters": true}',
        value=names,
    )


class StepMemory:
    """Bytes of this rank by purpose, in the words of `polyaccel plan`: estimated by the plan, and counted from the
    buffers that are there.

    Of what is in use only inside a step, pools keep the most that there was: gradient buckets in flight, gathered
    parameters, staging. What is not kept, a gradient outside its bucket and codes on their way, is estimated and not
    counted.
    """

    def __init__(
        self,
        plan: StepPlan,
        params: ParamBuckets,
        reducer: GradReducer,
        states: OptimizerState,
        staging: Staging,
    ) -> None:
        self._plan = plan
        self._params = params
        self._reducer = reducer
        self._states = states
        self._staging = staging

    def estimated(self) -> list[tuple[str, int]]:
        """What the plan of the buffers estimates."""
        return memory_by_purpose(self._plan)

    def measured(self) -> list[tuple[str, int]]:
        """What is there."""
        found: Counter[tuple[Place, Purpose]] = Counter()

        def add(purpose: Purpose, planned: PlannedBuffer | None, buffers: Iterable[Buffer]) -> None:
            place = Place.DEVICE if planned is None else planned.place
            found[place, purpose] += sum(buffer.nbytes for buffer in buffers)

        for bucket in self._params:
            plan = bucket.plan
            add(Purpose.PARAMS, plan.params, [bucket.own if bucket.full is None else bucket.full])
            if bucket.out is not None and isinstance(plan, TrainedBucketPlan):
                add(Purpose.MASTER, plan.master, [bucket.master])
        plans = {each.bucket.index: each for each in self._plan.trained}
        for shard in self._states.shards:
            for name, state in shard.states.items():
                add(Purpose.OPTIM, plans[shard.bucket.index].states.get(name), memory_of(state))
        for gradients in self._reducer.buckets:
            add(Purpose.GRADS, plans[gradients.bucket.index].gradient, gradients.resident())
        gathered = self._params.gathered
        found[Place.DEVICE, Purpose.SECOND] = gathered.second.nbytes
        for purpose, pool in ((Purpose.GRADS_IN_FLIGHT, self._reducer.pool), (Purpose.GATHERED, gathered.pool)):
            found[Place.DEVICE, purpose] = sum(numel * dtype.itemsize for numel, dtype in pool.held())
        for place, nbytes in self._staging.held().items():
            found[place, Purpose.STAGING] += nbytes
        return in_words(found)
