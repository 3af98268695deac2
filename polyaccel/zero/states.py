"""Master weights and optimizer states on one rank: what an update walks over, wherever it rests.

[Note: Updates off the device]
The kernels that update a shard are those of its tier. Where they do not reach the device's memory, a sharded gradient
rests in theirs, copied there bucket by bucket while later gradients still arrive, and a part of a replicated one is
copied to it before the update; where they do not reach the parameters, the new ones are copied there after it, in their
own type. Copies pass through buffers that the shards of a tier share. Those from the device have a stream of their own,
which waits for the reduction of their bucket alone, so that the host can update early buckets while the device still
computes the gradients of late ones. Those to the device are queued behind the backward pass, which may read the
parameters still. Reading, updating, writing and publishing overlap, bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from polyaccel.buffer import Buffer
from polyaccel.offload.tier import Tier
from polyaccel.types import DType
from polyaccel.zero.optimizers import Group, Run, Shard, SliceOptimizer
from polyaccel.zero.params import BucketParams
from polyaccel.zero.placement import StatePlacement
from polyaccel.zero.policy import ZeroPolicy
from polyaccel.zero.rounding import WeightRounding
from polyaccel.zero.staging import Staging


class StateStore:
    """The shards of the trainable `places`, their states as `optimizer` starts with them; none without an optimizer."""

    def __init__(
        self,
        places: Iterable[BucketParams],
        placement: StatePlacement,
        optimizer: SliceOptimizer | None,
        groups: Sequence[Group],
        policy: ZeroPolicy,
        staging: Staging,
    ) -> None:
        self._placement = placement
        self._policy = policy
        self._staging = staging
        self.shards: list[Shard] = []
        self._by_bucket: dict[int, Shard] = {}
        if optimizer is not None:
            for place in places:
                if place.bucket.kind.trainable:
                    self._add(place, optimizer, groups[place.bucket.kind.group])

    def _add(self, place: BucketParams, optimizer: SliceOptimizer, group: Group) -> None:
        tier = self._placement.tier_of(place.bucket)
        shard = Shard(place.bucket, tier, place.master, place.out, place.slices())
        for name in optimizer.state_names:
            shard.allocate_state(name, DType.FLOAT32)
        optimizer.initialise_states(shard.states, group)
        self.shards.append(shard)
        self._by_bucket[place.bucket.index] = shard

    def get(self, index: int) -> Shard | None:
        """The shard of a bucket; None for a frozen one, and without an optimizer."""
        return self._by_bucket.get(index)

    def walk(self, prepare: Callable[[Shard], None]) -> Generator[Shard, None, None]:
        """Every shard in order, each ready for the kernels of its tier until the walk moves on.

        `prepare` gives a shard its gradient, and what to do with it, before it is made ready. `hand_over` what was
        updated before the walk moves on. See [Note: Updates off the device]. Raises OffloadError as `Tier.lend` does.
        """
        with ExitStack() as stack:
            walks: dict[Tier, Generator[list[Buffer], None, None]] = {}
            for tier in dict.fromkeys(shard.tier for shard in self.shards):
                groups = [[shard.master, *shard.states.values()] for shard in self.shards if shard.tier is tier]
                walks[tier] = stack.enter_context(closing(tier.lend(groups)))
            for shard in self.shards:
                prepare(shard)
                yield self._ready(shard, next(walks[shard.tier]))
            for walk in walks.values():
                next(walk, None)  # its end, which raises what could not be written

    def _ready(self, shard: Shard, lent: list[Buffer]) -> Shard:
        master, *states = lent
        grad, out = shard.grad, shard.out
        at_rest = self._placement.gradients_tier_of(shard.bucket, self._policy)
        if shard.tier.compute is not at_rest.compute and grad is not None:
            device_grad, grad = grad, self._stage(shard, "grad", grad.dtype)
            with self._staging.stream.use():
                grad.copy_from(device_grad)
        if out is not None and not self._placement.is_within_reach(shard.bucket):
            out = self._stage(shard, "out", out.dtype)
        return replace(shard, master=master, states=dict(zip(shard.states, states, strict=True)), grad=grad, out=out)

    def _stage(self, shard: Shard, use: str, dtype: DType) -> Buffer:
        """As many elements as the shard has, where its kernels reach them; all shards of a tier share the memory."""
        return self._staging.borrow(shard.tier, use, shard.master.numel, dtype)

    def hand_over(self, lent: Shard) -> None:
        """Write the new parameters of a shard that `walk` gave to where they rest."""
        target = self._by_bucket[lent.bucket.index].out
        if target is None or lent.out is None or lent.out is target:
            return
        for piece in lent.slices:  # and not the padding between them, which nobody has written
            if lent.updates(piece):
                window = (piece.shard_offset, piece.length)
                target.view(*window).copy_from(lent.out.view(*window))

    def forget_gradients(self) -> None:
        for shard in self.shards:
            shard.grad = None

    def close(self) -> None:
        """Let go of all states, and close their tiers."""
        self.shards.clear()
        self._by_bucket.clear()
        self._placement.close()


def find_runs(
    shard: Shard, origin: int, touched: frozenset[str], steps: Mapping[str, int], rounding: WeightRounding
) -> Iterator[Run]:
    """The longest stretches of a shard whose parameters had a gradient and as many updates; padding goes along.

    Where parameters are rounded stochastically, each has a stretch of its own.

    Stretches start where slots start, hence aligned; see [Note: Slices and rounding] in `ops.base`.
    """
    slots = shard.bucket.slots
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
        run = Run(begin - low, end - begin, steps[slot.param.fqn], rounding.of(slot.param, begin - slot.offset))
        if open_run is not None and open_run.continues_in(run):
            open_run = replace(open_run, numel=open_run.numel + run.numel)
        else:
            if open_run is not None:
                yield open_run
            open_run = run
    if open_run is not None:
        yield open_run
