"""DiLoCo's outer step: replica groups train apart, and exchange how far they have moved (Douillard et al. 2023, arXiv
2311.08105; streaming: Douillard et al. 2025, arXiv 2501.18512).

[Note: Outer steps]
Every group starts from the same outer weights and trains by itself. Every `sync_every` steps each rank subtracts its
master weights from the outer weights, averages that difference over the groups, in their order, and gives it to SGD as
the gradient of the outer weights. The masters become the outer weights. A rank exchanges its own slice with the ranks
at its place in other groups, so a byte crosses the slow links once. The model can be cut into fragments, each with its
own turn, and an exchange may last some steps: what a group has learned meanwhile is lost, except for a share `alpha`.
Differences may travel in 4 or 8 bits; a group then adds what rounding left out to its next difference.

Weights that are not finite in some group, and groups that hold other outer weights than the first, are errors on all
ranks: their average would be the weights of no model.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite

from polyaccel.comm.base import Communicator
from polyaccel.comm.work import Work
from polyaccel.comm.wrappers.quantized import QuantizedCommunicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import ShardingError
from polyaccel.ops.base import CAST, REDUCE, SCALE, UPDATE
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.plan.policy import (
    BLOCK_NUMEL,
    OUTER_ERROR,
    OUTER_GRADIENT,
    OUTER_MOMENTUM,
    OUTER_WEIGHTS,
    OuterPolicy,
)
from polyaccel.zero.update.grad_norm import SquareSums, allocate_sums, read_sums, write_sums
from polyaccel.zero.update.optimizers import Shard

_LABEL = "outer gradient"


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """This rank's replica group, and the ranks at the same place in every group."""

    inside: Communicator
    across: Communicator

    @property
    def index(self) -> int:
        """The number of this group."""
        return self.across.rank

    @property
    def count(self) -> int:
        """The number of groups."""
        return self.across.world_size


@dataclass(eq=False, slots=True)
class _Exchange:
    """A shard's difference on its way. `sent` is in the memory of the communicator, as `arrived` is, which has what
    each group gives where that is coded."""

    shard: Shard
    difference: Buffer
    sent: Buffer
    arrived: Buffer | None
    work: Work


@dataclass(eq=False, slots=True)
class _Fragment:
    """A part of the model with its own turn: `offset` steps after the first one's."""

    shards: list[Shard]
    offset: int
    under_way: list[_Exchange] = field(default_factory=list)
    facts: Buffer | None = None
    """For each group whether its weights are not finite, then the squares of its outer weights."""
    gradients: dict[int, Buffer] = field(default_factory=dict)
    """What has arrived, by bucket, where no state keeps it."""


class OuterStep:
    """The outer steps of `step`, whose ranks are those of `group`. `steps` counts steps, equally in all groups.

    Every group begins with the weights of the first. Collective over all groups.
    """

    def __init__(self, step: ZeroEngine, group: ReplicaGroup, policy: OuterPolicy, steps: Callable[[], int]) -> None:
        self._step = step
        self._group = group
        self._policy = policy
        self._steps = steps
        self._kernels = group.across.accelerator.kernels()
        settings = {"lr": policy.lr, "momentum": policy.momentum, "nesterov": policy.nesterov}
        self._rule = OPTIMIZERS["SGD"].rule(settings, 2)  # of which a momentum of zero makes the gradient, as the first
        self._coded = None
        if policy.bits is not None:
            self._coded = QuantizedCommunicator(
                group.across, gather_bits=policy.bits, reduce_bits=None, block_numel=BLOCK_NUMEL
            )
        shards, count = list(step.shards), policy.fragments
        self._fragments = [
            _Fragment(
                shards[len(shards) * index // count : len(shards) * (index + 1) // count],
                policy.sync_every * index // count,
            )
            for index in range(count)
        ]
        step.before_states_move.append(self.settle)
        self._begin()

    def _begin(self) -> None:
        """Let every group start from the weights of the first."""
        params = self._step.params
        for each in params:
            held = each.own if each.full is None else each.full
            for buffer in (held,) if each.master_is_view else (held, each.master):
                self._broadcast(buffer)
            each.own.bump_version()
            params.wait_shared_writes(each)
        params.all_gather_masters()
        for shard in self._step.shards:
            for piece in shard.slices:
                window = piece.shard_offset, piece.length
                shard.kernels[CAST](shard.master.view(*window), shard.states[OUTER_WEIGHTS].view(*window))
        self._group.across.barrier()

    def _broadcast(self, buffer: Buffer) -> None:
        across = self._group.across
        near = across.allocate(buffer.numel, buffer.dtype)
        near.copy_from(buffer)
        across.broadcast(near, 0, label="outer weights")
        buffer.copy_from(near)

    def settle(self) -> None:
        """Wait until what is under way has arrived, before states are saved or overwritten."""
        for fragment in self._fragments:
            self._receive(fragment)

    def after_step(self, loss: float | None) -> None:
        """End the exchanges that are due after this many steps, and begin others. Collective over all groups."""
        del loss
        now, delay = self._steps(), self._policy.delay
        if delay:
            self._end([one for one in self._fragments if self._begins_at(one, now - delay)])
        beginning = [one for one in self._fragments if self._begins_at(one, now)]
        for fragment in beginning:
            self._send(fragment)
        if not delay:
            self._end(beginning)

    def _begins_at(self, fragment: _Fragment, steps: int) -> bool:
        since = steps - fragment.offset
        return since > 0 and since % self._policy.sync_every == 0

    # Out.

    def _send(self, fragment: _Fragment) -> None:
        """Start to exchange how far this group has moved since the outer weights."""
        self._receive(fragment)
        step, inside, across = self._step, self._group.inside, self._group.across
        step.params.wait_all_gathers()
        step.params.end_fetches()
        outer, moved = SquareSums(1), SquareSums(1)
        differences = []
        for shard in fragment.shards:
            difference = self._difference(shard)
            outer.add(shard.tier.compute, [(0, shard.states[OUTER_WEIGHTS])])
            moved.add(shard.tier.compute, [(0, difference)])
            differences.append(difference)
        both = allocate_sums(step.accelerator, inside, 2)
        write_sums(both, array("d", [*outer.read(), *moved.read()]))
        inside.all_reduce(both, label="squares of outer weights")
        squares, distance = read_sums(both)
        fragment.under_way = [
            self._start(shard, difference) for shard, difference in zip(fragment.shards, differences, strict=True)
        ]
        count, index = self._group.count, self._group.index
        facts = array("d", bytes(8 * 2 * count))
        facts[index] = float(not (isfinite(distance) and isfinite(squares)))
        facts[count + index] = squares if isfinite(squares) else 0.0
        fragment.facts = allocate_sums(step.accelerator, across, 2 * count)
        write_sums(fragment.facts, facts)
        across.all_reduce(fragment.facts, label="facts of replica groups")

    def _difference(self, shard: Shard) -> Buffer:
        """The outer weights minus the master weights, with what rounding has left out before; zero between slots."""
        outer, kernels = shard.states[OUTER_WEIGHTS], shard.kernels
        difference = shard.states.get(OUTER_GRADIENT)
        if difference is None:
            difference = shard.tier.compute.allocate(outer.numel, DType.FLOAT32)
        difference.fill(0.0)
        for piece in shard.slices:
            window = piece.shard_offset, piece.length
            kernels[CAST](shard.master.view(*window), difference.view(*window))
        kernels[SCALE](difference, -1.0)
        kernels[REDUCE](difference, outer, ReduceOp.SUM)
        if OUTER_ERROR in shard.states:
            kernels[REDUCE](difference, shard.states[OUTER_ERROR], ReduceOp.SUM)
        return difference

    def _start(self, shard: Shard, difference: Buffer) -> _Exchange:
        across, is_async = self._group.across, self._policy.delay > 0
        near = across.allocate(difference.numel, DType.FLOAT32)
        near.copy_from(difference)
        if self._coded is None:
            return _Exchange(shard, difference, near, None, across.all_reduce(near, async_op=is_async, label=_LABEL))
        arrived = across.allocate(difference.numel * self._group.count, DType.FLOAT32)
        work = self._coded.all_gather(arrived, near, async_op=is_async, label=_LABEL)
        return _Exchange(shard, difference, near, arrived, work)

    # In.

    def _receive(self, fragment: _Fragment) -> None:
        """Wait for what is under way, and average it over the groups, in their order."""
        if fragment.facts is None:
            return
        facts, fragment.facts = read_sums(fragment.facts), None
        under_way, fragment.under_way = fragment.under_way, []
        for each in under_way:
            each.work.wait()
        self._check(facts)
        for each in under_way:
            total = each.sent
            if each.arrived is not None:
                self._keep_rest(each, each.arrived)
                total = each.arrived.view(0, total.numel)
                for index in range(1, self._group.count):
                    part = each.arrived.view(index * total.numel, total.numel)
                    self._kernels[REDUCE](total, part, ReduceOp.SUM)
            self._kernels[SCALE](total, 1.0 / self._group.count)
            each.difference.copy_from(total)
            if OUTER_GRADIENT not in each.shard.states:
                fragment.gradients[each.shard.bucket.index] = each.difference

    def _check(self, facts: array[float]) -> None:
        """Raise ShardingError, on all ranks, for weights that are not finite and for outer weights that differ."""
        count = self._group.count
        if bad := [index for index in range(count) if facts[index]]:
            raise ShardingError(
                f"weights of replica groups {bad} are not finite after {self._steps()} steps",
                hint="go back to a checkpoint, with a lower learning rate or gradient_clipping",
                value=bad,
            )
        squares = facts[count:]
        if others := [index for index in range(count) if squares[index] != squares[0]]:
            raise ShardingError(
                f"replica groups {others} have other outer weights than group 0 after {self._steps()} steps",
                hint="give every group the same weights and checkpoint",
                value=others,
            )

    def _keep_rest(self, each: _Exchange, arrived: Buffer) -> None:
        """Keep what this group's codes leave out of its difference."""
        numel, index = each.sent.numel, self._group.index
        rest = each.shard.states[OUTER_ERROR]
        coded = self._group.across.allocate(numel, DType.FLOAT32)
        coded.copy_from(arrived.view(index * numel, numel))
        self._kernels[SCALE](coded, -1.0)
        self._kernels[REDUCE](coded, each.sent, ReduceOp.SUM)
        rest.copy_from(coded)

    def _end(self, fragments: list[_Fragment]) -> None:
        """Update the outer weights of some fragments, and let this group's weights follow."""
        if not fragments:
            return
        for fragment in fragments:
            self._receive(fragment)
        step = self._step
        step.params.wait_all_gathers()
        step.params.end_fetches()
        with step.consistency.changing("an outer step"):
            for fragment in fragments:
                for shard in fragment.shards:
                    gradient = shard.states.get(OUTER_GRADIENT)
                    self._update(shard, fragment.gradients.pop(shard.bucket.index) if gradient is None else gradient)
                    step.params.all_gather_master(shard.bucket.index)

    def _update(self, shard: Shard, gradient: Buffer) -> None:
        kernels, outer, alpha = shard.kernels, shard.states[OUTER_WEIGHTS], self._policy.alpha
        momentum = [shard.states[OUTER_MOMENTUM]] if OUTER_MOMENTUM in shard.states else []
        kernels[UPDATE](self._rule, outer, gradient, momentum)
        room = None if alpha == 0.0 else shard.tier.compute.allocate(outer.numel, DType.FLOAT32)
        for piece in shard.slices:
            window = piece.shard_offset, piece.length
            own, shared = shard.master.view(*window), outer.view(*window)
            if room is None:
                kernels[CAST](shared, own)
                continue
            mixed, kept = room.view(*window), gradient.view(*window)
            mixed.copy_from(shared)
            kernels[SCALE](mixed, 1.0 - alpha)
            kernels[CAST](own, kept)
            kernels[SCALE](kept, alpha)
            kernels[REDUCE](mixed, kept, ReduceOp.SUM)
            kernels[CAST](mixed, own)
