"""The update of a step, and the master weights and optimizer states that it walks over, wherever they rest.

The ranks agree on what they must know; then bucket by bucket each waits for the gradient, updates and publishes.

[Note: Overlapped optimizer step]
Which parameters were touched and which gradients came late is known without any gradient's value. Unless the norm
decides something (clipping, skipping an overflow), the update of a bucket therefore begins as soon as that bucket's own
reduction has ended and its gradient is where the kernels are; later ones are still under way: in the network, or
because the device has not computed them yet. Buckets come in layout order on every rank, which is the order in which
gradients appear. Norms are added up on the way and agreed on after the last bucket was published. How much this gains
depends on the communicator: one that carries calls out strictly one after the other ends the reductions before it
agrees on anything.

[Note: Off-device updates]
The kernels that update a shard are those of its tier. Where they do not reach the device's memory, a sharded gradient
rests in theirs, copied there bucket by bucket while later gradients still arrive, and a part of a replicated one is
copied to it before the update; where they do not reach the parameters, the new ones are copied there after it, in their
own type. Copies pass through memory of each bucket, or, where the states are in files, through what the shards of a
tier share. Those from the device have their own stream, which waits for the reduction of their bucket alone, so that
the host can update early buckets while the device still computes the gradients of late ones. Those to the device are
queued behind the backward pass, which may read the parameters still. Reading, updating, writing and publishing overlap,
bucket by bucket. The host waits for a gradient when it computes with it, unless it has read the norm, which comes after
all of them ([Note: Copies under way]).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace

from polyaccel.core.buffer import Buffer
from polyaccel.errors import OffloadError
from polyaccel.offload.tier import Tier
from polyaccel.zero.buckets.grad_reducer import GradReducer
from polyaccel.zero.buckets.params import ParamBuckets
from polyaccel.zero.buckets.rounding import WeightRounding
from polyaccel.zero.plan.bucket_plan import PlannedBuffer, StepPlan, TrainedBucketPlan
from polyaccel.zero.plan.placement import Place
from polyaccel.zero.resources import Copies, Staging, StepResources
from polyaccel.zero.update.averaging import average_weights
from polyaccel.zero.update.consistency import Consistency
from polyaccel.zero.update.global_norm import GradientNorm
from polyaccel.zero.update.grad_norm import GradNormReducer, ReadyGrads
from polyaccel.zero.update.optimizers import Group, Run, Shard, SliceOptimizer
from polyaccel.zero.update.unread_norm import UnreadNorm


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of an update. Where the norm is on the device still, to look at it waits ([Note: Unread norms])."""

    applied: bool
    norm: GradientNorm | UnreadNorm
    clip_factor: float = 1.0
    noise_ratio: float | None = None
    """The gradient noise scale in batches; None where it is not measured, or not known yet."""

    @property
    def has_arrived(self) -> bool:
        """Whether the host has the norm, or may read it without waiting for the device."""
        return isinstance(self.norm, GradientNorm) or self.norm.has_arrived()

    @property
    def grad_norm(self) -> float:
        """The norm before clipping."""
        return self._read().norm

    @property
    def clipped_norm(self) -> float:
        """The norm after clipping."""
        return self._read().norm * self.clip_factor

    @property
    def first_nonfinite_param(self) -> str | None:
        """The first parameter whose gradient is not finite; None where all are."""
        return self._read().first_nonfinite_param

    def _read(self) -> GradientNorm:
        return self.norm if isinstance(self.norm, GradientNorm) else self.norm.read()


class OptimizerState:
    """The shards of the trained buckets of `plan`, with the states that `optimizer` starts from; none without an
    optimizer.

    `groups` has the hyperparameters of each optimizer group. The tiers are closed with the store.
    """

    def __init__(
        self,
        plan: StepPlan,
        parts: StepResources,
        params: ParamBuckets,
        optimizer: SliceOptimizer | None,
        groups: Sequence[Group],
        staging: Staging,
    ) -> None:
        self._tiers = parts.tiers
        self._params = params
        self._staging = staging
        self._plans = {each.bucket.index: each for each in plan.trained}
        self.shards: list[Shard] = []
        self._by_bucket: dict[int, Shard] = {}
        self._fetched: dict[int, tuple[Buffer, Copies]] = {}
        """Parts of replicated gradients that are on their way to the kernels, by bucket."""
        self._written: dict[PlannedBuffer, Copies] = {}
        """The last copies of new parameters to the device, by the memory that they are from."""
        self._is_arriving = False
        """New parameters are on their way from the device to host memory."""
        self._accelerator = parts.accelerator
        if optimizer is not None:
            for each in plan.trained:
                self._add(each, optimizer, groups[each.bucket.kind.group])

    def _add(self, plan: TrainedBucketPlan, optimizer: SliceOptimizer, group: Group) -> None:
        index, tier = plan.bucket.index, self._tiers.of_update(plan)
        params = self._params[index]
        shard = Shard(plan.bucket, tier, params.master, params.out, params.slices())
        for name, state in plan.states.items():
            if name in plan.scales:
                shard.allocate_blocks(name, plan.scales[name].numel, signed=optimizer.state_codes[name])
            else:
                shard.allocate_state(name, state.dtype)
        optimizer.initialise_states(shard.states, group, plan.bucket.slots[0].param)
        self.shards.append(shard)
        self._by_bucket[index] = shard

    def get(self, index: int) -> Shard | None:
        """The shard of a bucket; None for a frozen one, and without an optimizer."""
        return self._by_bucket.get(index)

    def iter_shards(self, prepare: Callable[[Shard], None]) -> Generator[Shard, None, None]:
        """Every shard in order, each ready for the kernels of its tier until the walk moves on.

        `prepare` gives a shard its gradient and runs before it is made ready. Call `write_back` for an updated shard
        before the walk moves on. See [Note: Off-device updates]. Raises OffloadError where a tier cannot read, or
        at the end cannot write (`Tier.stream_groups`).
        """
        with ExitStack() as stack:
            walks: dict[Tier, Generator[list[Buffer], None, None]] = {}
            for tier in dict.fromkeys(shard.tier for shard in self.shards):
                groups = [[shard.master, *shard.states.values()] for shard in self.shards if shard.tier is tier]
                walks[tier] = stack.enter_context(closing(tier.stream_groups(groups)))
            for shard in self.shards:
                prepare(shard)
                yield self._ready(shard, next(walks[shard.tier]))
            for walk in walks.values():
                next(walk, None)  # its end, which raises what could not be written

    def fetch_gradients(self, reducer: GradReducer) -> None:
        """Start to copy the parts of replicated gradients that are updated in host memory, where each has its own."""
        self._fetched.clear()
        if reducer.user_edits:
            self._staging.stream.wait(self._accelerator.current_stream().record())
        for gradients in reducer.buckets:
            shard, plan = self._by_bucket.get(gradients.bucket.index), self._plans[gradients.bucket.index]
            staged = plan.staged_gradient
            if shard is not None and staged is not None and staged.bucket is not None:
                self._fetched[gradients.bucket.index] = self._fetch(shard, gradients.result(), staged)

    def forget_fetched(self) -> None:
        """What `fetch_gradients` has brought has changed since, or is not used."""
        self._fetched.clear()

    def _fetch(self, shard: Shard, gradient: Buffer, staged: PlannedBuffer) -> tuple[Buffer, Copies]:
        """Start to copy a gradient to where the shard's kernels reach it."""
        near = self._stage(shard, "grad", staged)
        with self._staging.stream.use():
            near.start_copy(gradient)
            return near, self._staging.mark_arrivals()

    def _ready(self, shard: Shard, lent: list[Buffer]) -> Shard:
        master, *states = lent
        grad, out = shard.grad, shard.out
        plan = self._plans[shard.bucket.index]
        if plan.staged_gradient is not None and plan.gradient.place is Place.DEVICE and grad is not None:
            fetched = self._fetched.pop(shard.bucket.index, None)
            grad, copies = self._fetch(shard, grad, plan.staged_gradient) if fetched is None else fetched
            self._staging.wait_for(copies)
        if plan.staged_params is not None:
            out = self._stage(shard, "out", plan.staged_params)
            if (written := self._written.pop(plan.staged_params, None)) is not None:
                self._staging.wait_for(written)
        return replace(shard, master=master, states=dict(zip(shard.states, states, strict=True)), grad=grad, out=out)

    def _stage(self, shard: Shard, use: str, planned: PlannedBuffer) -> Buffer:
        """As many elements as the shard has, where its kernels reach them; all shards of a tier share the memory."""
        return self._staging.borrow(shard.tier, use, planned, shard.master.numel)

    def write_back(self, lent: Shard) -> None:
        """Write the new parameters of a shard that `iter_shards` gave to where they rest."""
        target = self._by_bucket[lent.bucket.index].out
        if target is None or lent.out is None or lent.out is target:
            return
        plan = self._plans[lent.bucket.index]
        departs = plan.place is not Place.DEVICE and plan.params.place is Place.DEVICE
        arrives = plan.place is Place.DEVICE and plan.params.place is Place.HOST
        for piece in lent.slices:  # and not the padding between them, which was not written
            if lent.updates(piece):
                window = (piece.shard_offset, piece.length)
                there, new = target.view(*window), lent.out.view(*window)
                if departs or arrives:
                    there.start_copy(new)
                else:
                    there.copy_from(new)
        if departs and plan.staged_params is not None:
            self._written[plan.staged_params] = self._staging.mark_departures()
        self._is_arriving |= arrives

    def wait_for_writes(self) -> None:
        """Return when new parameters have arrived in host memory, which the host and other streams read."""
        if self._is_arriving:
            self._is_arriving = False
            self._accelerator.current_stream().record().synchronize()

    def forget_gradients(self) -> None:
        for shard in self.shards:
            shard.grad = None

    def close(self) -> None:
        """Release all states, and close their tiers."""
        self.shards.clear()
        self._by_bucket.clear()
        self._fetched.clear()
        self._written.clear()
        self._tiers.close()


def find_runs(
    shard: Shard, origin: int, touched: frozenset[str], steps: Mapping[str, int], rounding: WeightRounding
) -> Iterator[Run]:
    """The longest stretches of a shard whose parameters had a gradient and as many updates; padding goes along.

    Where parameters are rounded stochastically, each has its own stretch.

    Stretches start where slots start, hence aligned; see [Note: Slice-independent rounding] in `ops.base`.
    """
    slots = shard.bucket.slots
    if not shard.master.numel:
        return
    if not rounding.is_stochastic and all(slot.param.fqn in touched for slot in slots):
        counts = {steps[slot.param.fqn] for slot in slots}
        if len(counts) == 1:  # as nearly always
            yield Run(0, shard.master.numel, counts.pop())
            return
    starts = [slot.offset for slot in slots[1:]]
    stops = [*starts, shard.bucket.numel]
    low, high = origin, origin + shard.master.numel
    open_run: Run | None = None
    for slot, stop in zip(slots, stops, strict=True):
        begin, end = max(low, slot.offset), min(high, stop)
        if begin >= end:
            continue
        if slot.param.fqn not in touched:
            if open_run is not None:
                yield open_run
            open_run = None
            continue
        run = Run(
            begin - low, end - begin, steps[slot.param.fqn], rounding.make_rounding(slot.param, begin - slot.offset)
        )
        if open_run is not None and open_run.continues_in(run):
            open_run = replace(open_run, numel=open_run.numel + run.numel)
        else:
            if open_run is not None:
                yield open_run
            open_run = run
    if open_run is not None:
        yield open_run


class OptimizerStep:
    """One rank's part in the updates of a step: the shards of `states` with the gradients that `facts` knows.

    `waiting` is entered around waits for gradients.
    """

    def __init__(
        self,
        plan: StepPlan,
        parts: StepResources,
        optimizer: SliceOptimizer,
        states: OptimizerState,
        params: ParamBuckets,
        facts: GradNormReducer,
        consistency: Consistency,
        waiting: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._policy = policy = plan.policy
        self._communicator = parts.communicators.world
        self._optimizer = optimizer
        self._states = states
        self._params = params
        self._steps = params.steps
        self._facts = facts
        self._gradients = {gradients.bucket.index: gradients for gradients in facts.buckets}
        self._waiting = waiting
        self._consistency = consistency
        self._updated = 0
        """Shards of the present update that are published."""

        self.measures = policy.needs_norm
        """Whether the norm is needed."""
        self.is_queued = parts.accelerator.capabilities().streams
        """The device's streams keep the order: waits for a reduction hold up a stream and not the host."""
        # Then ranks would wait for all gradients when they agree on what has arrived.
        gains = not self.is_queued or (bool(plan.offload.states) and self._communicator.world_size == 1)
        self.is_early = gains and not (policy.norm_decides or policy.defer_publish)
        """Whether the update begins before all gradients have arrived, and the norm is agreed on last: not where the
        norm decides something, where it would wait for what may be published later, or where nothing is gained."""
        decides = policy.norm_decides or policy.noise_decay is not None or bool(plan.offload.states)
        self.spares_wait = self.is_queued and facts.agrees_on_host and not (self.is_early or decides)
        """Whether the update begins without anything of the device: not where the host decides by the norm, or computes
        with gradients."""

    def apply(
        self,
        groups: Sequence[Group],
        arrivals: ReadyGrads,
        norm: GradientNorm | UnreadNorm | None,
        loss_scale: float,
        discard_gradients: Callable[[], None],
    ) -> StepResult:
        """Update every shard with its gradient and publish its bucket, then discard the gradients. Collective.

        `norm` is None where it is not known before. Raises OffloadError where a tier could not write: at the end of
        the walk, with everything updated and published. After an error in the middle the state is inconsistent.
        """
        before = dict(self._steps)
        for fqn in arrivals.params:
            self._steps[fqn] += 1
        factor = norm.clip_factor(self._policy.clip_norm) if isinstance(norm, GradientNorm) else 1.0
        sums = self._facts.new_sums()

        def prepare(shard: Shard) -> None:
            bucket = shard.bucket
            gradients = self._gradients[bucket.index]
            with self._waiting():
                gradients.finish()
                if norm is None and self.measures:
                    self._facts.add_squares(sums, gradients)
                shard.grad, shard.find_rows = gradients.result(), gradients.rows
            shard.steps = {slot.param.fqn: self._steps[slot.param.fqn] for slot in bucket.slots}
            origin = self._params[bucket.index].origin
            shard.runs = tuple(find_runs(shard, origin, arrivals.params, self._steps, self._params.rounding))

        self._params.end_fetches()
        unwritten: OffloadError | None = None
        self._updated = 0
        try:
            with closing(self._states.iter_shards(prepare)) as walk:
                lent = self._counted(walk)
                for shard in self._optimizer.update(lent, groups, factor / loss_scale, self._communicator):
                    if self._policy.ema_decay:
                        average_weights(shard, self._policy.ema_decay)
                    self._states.write_back(shard)
                    self._params.all_gather_updated(shard.bucket.index)
                    self._updated += 1
                    self._mark()
                self._states.wait_for_writes()
        except BaseException as error:
            if self._updated < len(self._states.shards) or not isinstance(error, OffloadError):
                self._steps.update(before)
                raise
            unwritten = error  # all was updated: no reason to leave the other ranks alone
        if norm is None:
            norm = self._facts.agree_on_norm(sums, loss_scale) if self.measures else GradientNorm(0.0, None)
        if not self._policy.defer_publish:
            self._params.wait_all_gathers()
        self._states.forget_gradients()
        discard_gradients()
        self._consistency.mark_consistent()
        if unwritten is not None:
            raise unwritten
        return StepResult(True, norm, factor)

    def _counted(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        for shard in shards:
            self._mark()
            yield shard

    def _mark(self) -> None:
        what = f"an update, when {self._updated} of {len(self._states.shards)} buckets were updated,"
        self._consistency.mark_inconsistent(what, self._updated)
