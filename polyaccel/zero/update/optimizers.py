"""Optimizers on slices: what the step updates is a `Shard` of flat buffers, never a tensor with a shape.

What an optimizer keeps and computes is a row of `polyaccel.ops.optimizers`. An elementwise one needs no more than one
fused kernel call for each run of elements. LAMB scales each parameter by a ratio of its norms, so it adds the squared
norms of all slices over the ranks first. Hyperparameters come from `groups`, one mapping for each optimizer group, read
again at every step so that learning-rate schedules need not know about any of this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any

from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import CheckpointError, ShardingError
from polyaccel.offload.tier import Tier
from polyaccel.ops.base import CAST, SQUARE_SUMS, UPDATE, KernelTable, Rule, StochasticRounding
from polyaccel.ops.optimizers import Optimizer, apply_direction
from polyaccel.zero.buckets.row_exchange import RowSet
from polyaccel.zero.plan.layout import Bucket, Granule, Slice
from polyaccel.zero.update.block_states import BlockBuffer, BlockMemory
from polyaccel.zero.update.grad_norm import allocate_sums, read_sums, sums_in

Group = Mapping[str, Any]


UNCHANGED: Mapping[str, Any] = {
    "amsgrad": False, "maximize": False, "centered": False, "nesterov": False, "dampening": 0, "bias_correction": True,
    "lr_decay": 0,
}  # fmt: skip
"""Settings of other tools' groups that change the formula, with the value that stands for their absence."""


@dataclass(frozen=True, slots=True)
class PeerState:
    """The optimizer state of another tool: the `family` of optimizers whose formula reads it (None: unknown), the
    `states` by name, and the hyperparameters of each of its groups."""

    family: str | None
    states: frozenset[str]
    groups: Sequence[Group]

    def require(self, ours: str, *, fits: bool) -> None:
        """Raise CheckpointError unless the optimizer `ours` `fits`."""
        if not fits:
            theirs = self.family or f"an optimizer with the states {', '.join(sorted(self.states)) or 'none'}"
            raise CheckpointError(
                f"the imported checkpoint has the optimizer state of {theirs}, this run has {ours}",
                hint="build the optimizer that was saved; load_optimizer_states=False begins with a new one",
                value=theirs,
            )

    def require_known(self, known: Collection[str], ours: str) -> None:
        """Raise CheckpointError where a group has a setting outside of `known` that changes the formula."""
        for key, absent in UNCHANGED.items():
            value = next((group[key] for group in self.groups if key in group and group[key] != absent), None)
            if value is not None and key not in known:
                raise CheckpointError(
                    f"the imported checkpoint has {key}={value!r}, which {ours} of this run does not have",
                    hint="build the optimizer that was saved; load_optimizer_states=False begins with a new one",
                    value=key,
                )


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [offset, offset + numel) of a shard, updated together; `step` counts their updates with this one.

    `rounding` is that of their parameters of 16 bits, None to nearest.
    """

    offset: int
    numel: int
    step: int
    rounding: StochasticRounding | None = None

    def continues_in(self, later: Run) -> bool:
        """Whether one run can stand for both."""
        is_adjacent = self.offset + self.numel == later.offset
        return is_adjacent and self.step == later.step and self.rounding is None and later.rounding is None


def no_rows() -> None:
    """Gradients are whole."""


@dataclass(slots=True)
class Shard:
    """One bucket as an optimizer sees it: the elements that this rank updates, in flat buffers of equal length.

    `tier` is where `master` and `states` rest, and whose kernels update them. `grad` has the reduced gradient times the
    loss scale. `out` is where the parameters stand, None when `master` is that memory itself. `slices` are the
    parameters' parts of the shard, `runs` what to update in this step.
    """

    bucket: Bucket
    tier: Tier
    master: Buffer
    out: Buffer | None
    slices: tuple[Slice, ...]
    states: dict[str, Buffer] = field(default_factory=dict)
    grad: Buffer | None = None
    runs: tuple[Run, ...] = ()
    find_rows: Callable[[], RowSet | None] = no_rows
    """Finds the rows that had a gradient on some rank, where gradients travel as rows."""
    steps: dict[str, int] = field(default_factory=dict)
    """How many updates each parameter of the bucket has had. A parameter without a gradient on any rank has none."""

    def cut(self, run: Run) -> tuple[Buffer, Buffer, Buffer | None, dict[str, Buffer]]:
        """Views (master, gradient, out, states) of a run."""
        assert self.grad is not None  # set by the step for every shard that it passes on
        window = (run.offset, run.numel)
        return (
            self.master.view(*window),
            self.grad.view(*window),
            None if self.out is None else self.out.view(*window),
            {name: state.view(*window) for name, state in self.states.items()},
        )

    def write_params(self, run: Run) -> None:
        """Write the parameters of a run from its updated master weights, unless these are the parameters."""
        master, _, out, _ = self.cut(run)
        if out is not None:
            self.kernels[CAST](master, out, run.rounding)

    def run_of(self, piece: Slice) -> Run | None:
        """The run that updates one of `slices` in this step, as a whole; None if none does."""
        inside = (run for run in self.runs if run.offset <= piece.shard_offset < run.offset + run.numel)
        return next(inside, None)

    def updates(self, piece: Slice) -> bool:
        """Whether one of `slices` is updated in this step."""
        return self.run_of(piece) is not None

    def allocate_state(self, name: str, dtype: DType) -> Buffer:
        """Add a state, zeros, in the shard's tier. Raises OffloadError when there is no room."""
        key = f"bucket{self.bucket.index}.{name}"
        self.states[name] = self.tier.allocate(key, self.master.numel, dtype)
        return self.states[name]

    def allocate_blocks(self, name: str, scales_numel: int, *, signed: bool) -> None:
        """Add a state, zeros, in a byte an element. Raises OffloadError when there is no room, and ShardingError
        for a tier that lends its buffers."""
        if not self.tier.is_resident:
            raise ShardingError(
                f"optimizer states of 8 bits cannot rest in the tier {self.tier.name!r}",
                hint='offload them to "cpu", or use states of 32 bits',
                value=self.tier.name,
            )
        codes = self.allocate_state(name, DType.UINT8)
        scales = self.tier.allocate(f"bucket{self.bucket.index}.{name}.scales", scales_numel, DType.FLOAT32)
        memory = BlockMemory.over(codes, scales, self.tier.compute, self.slices, signed=signed)
        self.states[name] = BlockBuffer(memory, self.master.numel)

    @property
    def kernels(self) -> KernelTable:
        """Those that reach the shard."""
        return self.tier.compute.kernels()


class SliceOptimizer(ABC):
    """An optimizer that works on shards."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """The optimizer's name in a checkpoint: states of one kind mean nothing to another."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """The states that the engine allocates for it, each as long as the shard."""
        return ()

    @property
    def state_types(self) -> Mapping[str, DType]:
        """Types of the states that rest in another type than the config gives, which is float32 by default."""
        return {}

    @property
    def group_states(self) -> Mapping[int, tuple[str, ...]]:
        """The states of groups that have only some of `state_names`."""
        return {}

    @property
    def state_codes(self) -> Mapping[str, bool]:
        """The states of type uint8, which are numbers in a code of 8 bits, and whether they may be negative."""
        return {}

    def granules(self, params: Sequence[ParamSpec]) -> Mapping[str, Granule]:
        """Return what its update needs whole of `params`, by name; elements of those that are not named. Raises
        ShardingError for parameters that it cannot have whole."""
        return {}

    def costs(self, params: Sequence[ParamSpec]) -> Mapping[str, int]:
        """Return the work of an update for each element of parameters with granules, by name. Owners are balanced by
        it; without it by bytes."""
        return {}

    @property
    def averages_weights(self) -> bool:
        """Whether its states hold an average of weights that is evaluated in place of them."""
        return False

    def write_averages(self, shard: Shard, group: Group) -> None:  # noqa: B027 - most have none
        """Overwrite the master weights of a shard with their average."""

    def initialise_states(  # noqa: B027 - zeros suit most
        self, states: Mapping[str, Buffer], group: Group, param: ParamSpec
    ) -> None:
        """Set new states, which are zero, to where the optimizer starts. They are of `param`, or of all parameters of
        its bucket."""

    def adopt_groups(self, peer: PeerState) -> list[dict[str, Any]]:
        """Return the groups of another tool's optimizer, with this one's keys. Raises CheckpointError where its states
        mean something else to this one."""
        peer.require(self.kind, fits=False)
        return []

    @abstractmethod
    def update(
        self, shards: Iterable[Shard], groups: Sequence[Group], grad_scale: float, communicator: Communicator
    ) -> Iterator[Shard]:
        """Update every shard with its gradient times `grad_scale`; yield each as soon as its parameters are final.

        Collective: every rank passes the same buckets in the same order. A shard's buffers are good until the next one
        is asked for, where its tier is not resident.
        """


class RowOptimizer(SliceOptimizer):
    """One of `polyaccel.ops.optimizers`."""

    def __init__(self, row: Optimizer) -> None:
        self.row = row

    @property
    def kind(self) -> str:
        return self.row.kind

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(self.row.states)

    def adopt_groups(self, peer: PeerState) -> list[dict[str, Any]]:
        peer.require(self.kind, fits=peer.family == self.kind)
        peer.require_known(self.row.keys, self.kind)
        keys = {key: key for key in (*self.row.keys, "initial_lr")}
        if "decoupled" in self.row.keys:
            keys["decoupled_weight_decay"] = "decoupled"
        return [{keys[key]: value for key, value in group.items() if key in keys} for group in peer.groups]

    def initialise_states(self, states: Mapping[str, Buffer], group: Group, param: ParamSpec) -> None:
        for name, key in self.row.states.items():
            if key is not None:
                states[name].fill(float(group.get(key, 0.0)))

    def update(
        self, shards: Iterable[Shard], groups: Sequence[Group], grad_scale: float, communicator: Communicator
    ) -> Iterator[Shard]:
        for shard in shards:
            self.update_shard(shard, groups[shard.bucket.kind.group], grad_scale, communicator)
            yield shard

    @abstractmethod
    def update_shard(self, shard: Shard, group: Group, grad_scale: float, communicator: Communicator) -> None:
        """Update one shard, with the hyperparameters of its `group`. Collective as `update`."""


class ElementwiseOptimizer(RowOptimizer):
    """An update that treats every element in the same way: one kernel call for each run."""

    def update_shard(self, shard: Shard, group: Group, grad_scale: float, communicator: Communicator) -> None:
        for run in shard.runs:
            _update_run(shard, run, self.row.rule(group, run.step), grad_scale)


class ScheduleFree(ElementwiseOptimizer):
    """Schedule-free AdamW, whose weights are evaluated at their average (`polyaccel.ops.formulas`)."""

    name = "ScheduleFreeAdamW"

    @property
    def averages_weights(self) -> bool:
        return True

    def write_averages(self, shard: Shard, group: Group) -> None:
        beta1, state = float(group["betas"][0]), shard.states["z_minus_y"]
        apart = shard.tier.compute.allocate(state.numel, state.dtype)
        apart.copy_from(state)
        shard.kernels[UPDATE](apply_direction((1 - beta1) / beta1), shard.master, apart, ())


class TrustRatioOptimizer(RowOptimizer):
    """An update whose rate for a parameter follows from the norms of the parameter and of its direction: LAMB (You et
    al. 2020, algorithm 2), with DeepSpeed's bounds on that ratio.

    The norms are over the whole parameter, though it be cut over ranks. A subclass may choose another direction and
    another rate.
    """

    def direction_rule(self, group: Group, step: int) -> Rule:
        """The rule that writes the direction of update number `step` (from 1)."""
        return self.row.rule(group, step)

    def rate(self, group: Group, step: int) -> float:
        """What the direction of update number `step` is multiplied by, together with the ratio."""
        return float(group["lr"])

    def update_shard(self, shard: Shard, group: Group, grad_scale: float, communicator: Communicator) -> None:
        dtype = shard.master.dtype if shard.master.dtype is DType.FLOAT64 else DType.FLOAT32
        direction = shard.tier.compute.allocate(shard.master.numel, dtype)
        for run in shard.runs:
            _update_run(shard, run, self.direction_rule(group, run.step), grad_scale, direction)
        ratios = self._trust_ratios(shard, direction, group, communicator)
        for piece in shard.slices:
            run_of_piece = shard.run_of(piece)
            if run_of_piece is not None:
                window = (piece.shard_offset, piece.length)
                rounding = run_of_piece.rounding
                shard.kernels[UPDATE](
                    apply_direction(self.rate(group, run_of_piece.step) * ratios[piece.fqn]),
                    shard.master.view(*window),
                    direction.view(*window),
                    (),
                    None if shard.out is None else shard.out.view(*window),
                    1.0,
                    rounding and rounding.at(piece.shard_offset - run_of_piece.offset),
                )

    def _trust_ratios(
        self, shard: Shard, direction: Buffer, group: Group, communicator: Communicator
    ) -> dict[str, float]:
        """`|weights| / |direction|` of each parameter in the bucket, bounded; 1 where either norm is zero."""
        names = [slot.param.fqn for slot in shard.bucket.slots]
        sums = sums_in(shard.tier.compute, 2 * len(names))
        pieces: list[tuple[int, Buffer]] = []
        for piece in shard.slices:
            index = names.index(piece.fqn)
            pieces.append((index, shard.master.view(piece.shard_offset, piece.length)))
            pieces.append((len(names) + index, direction.view(piece.shard_offset, piece.length)))
        shard.kernels[SQUARE_SUMS](sums, pieces)
        bucket = shard.bucket
        holds_all = shard.master.numel == bucket.numel and bucket.counts is None
        if not holds_all or bucket.kind.cut:  # over ranks
            own, sums = sums, allocate_sums(communicator.accelerator, communicator, 2 * len(names))
            sums.copy_from(own)
            communicator.all_reduce(sums, label="lamb norms", bucket=bucket.index)
        times = bucket.world_size if holds_all and bucket.kind.cut else 1  # so often each element is counted
        values = [value / times for value in read_sums(sums)]
        low, high = trust_bounds(self.row.rule(group, 1))
        ratios: dict[str, float] = {}
        for index, fqn in enumerate(names):
            weight, update = sqrt(values[index]), sqrt(values[len(names) + index])
            usable = weight > 0.0 and update > 0.0 and isfinite(weight) and isfinite(update)
            ratios[fqn] = min(max(weight / update, low), high) if usable else 1.0
        return ratios


def trust_bounds(rule: Rule) -> tuple[float, float]:
    """The least and the greatest trust ratio."""
    return rule.settings["min_coeff"], rule.settings["max_coeff"]


def _update_run(shard: Shard, run: Run, rule: Rule, grad_scale: float, direction: Buffer | None = None) -> None:
    """One kernel call. `direction` is as long as the shard, for a rule that writes one in place of the weights."""
    master, grad, out, states = shard.cut(run)
    if direction is not None:
        out, states["direction"] = None, direction.view(run.offset, run.numel)
    given = [states[name] for name, _ in rule.formula.states]
    shard.kernels[UPDATE](rule, master, grad, given, out, grad_scale, run.rounding)
