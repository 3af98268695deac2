"""Muon on the matrices that this rank owns, bucket by bucket.

Matrices of equal shape in a bucket are one batch. Buckets are published one after the other, so that the iteration of
one overlaps the exchanges of others. All else has AdamW's kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyaccel.comm.base import Communicator
from polyaccel.core.types import ParamSpec
from polyaccel.engine.policies.muon import MUON, MUON_STATES, ROW_AVERAGE, element_cost, matrix_states
from polyaccel.errors import ConfigError, Problem
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.torch.muon.blocks import Along, TensorBlocks
from polyaccel.torch.muon.matrices import Matrices, matrices_of, rule_of
from polyaccel.torch.muon.newton_schulz import add_orthogonalized, orthogonalize, update_dtype
from polyaccel.torch.muon.normuon import scale_rows
from polyaccel.zero.plan.layout import ROW, WHOLE, Granule
from polyaccel.zero.update.optimizers import ElementwiseOptimizer, Group, Run, Shard, SliceOptimizer

_BATCH_NUMEL = 2**24
"""Elements of a batch of matrices at most, and one matrix at least."""
_SMALL_NUMEL = 2**12
"""Matrices of more elements are no batch on the CPU, where one gains nothing."""


@dataclass(frozen=True, slots=True)
class _Update:
    """Matrices to orthogonalise, and where the result, times `rate`, is added: both views of equal length, and so are
    the averages of rows, if rows are scaled."""

    shape: Matrices
    wanted: Tensor
    target: Tensor
    rate: float
    averages: Tensor | None = None

    def matrices(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield what is wanted, target and averages of each matrix."""
        sides = -1, self.shape.rows, self.shape.columns
        wanted, target = self.wanted.view(sides), self.target.view(sides)
        averages = [None] * len(wanted) if self.averages is None else self.averages.view(sides)
        yield from zip(wanted, target, averages, strict=True)


class MuonOptimizer(SliceOptimizer):
    """Updates whole matrices of the groups with `use_muon`, and slices of the others by AdamW.

    `heads` has the rows of an attention head of those parameters whose heads are matrices alone. Blocks of matrices
    that ranks `along` an axis have are gathered, or matrices alone where they are `blockwise`. The iteration runs on
    `device`.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        heads: Mapping[str, int],
        *,
        along: Along,
        blockwise: bool,
        device: torch.device,
    ) -> None:
        self._groups, self._heads, self._along = groups, heads, along
        self._blockwise, self._device = blockwise, device
        self._adam = ElementwiseOptimizer(OPTIMIZERS["AdamW"])
        self._blocks: TensorBlocks | None = None

    @property
    def kind(self) -> str:
        return f"polyaccel.{MUON}"  # torch has one of that name, with other settings

    @property
    def state_names(self) -> tuple[str, ...]:
        scaled = [each for each in self._groups if each["use_muon"] and each.get("normuon_beta") is not None]
        return (*matrix_states(scaled[0]["normuon_beta"] if scaled else None), *self._adam.state_names)

    @property
    def group_states(self) -> dict[int, tuple[str, ...]]:
        return {
            at: matrix_states(group.get("normuon_beta")) if group["use_muon"] else self._adam.state_names
            for at, group in enumerate(self._groups)
        }

    def granules(self, params: Sequence[ParamSpec]) -> Mapping[str, Granule]:
        """Return the matrices that shards must not cut. Collective where ranks have blocks of parameters. Raises
        ConfigError where rows are scaled and ranks gather matrices."""
        matrices = [each for each in params if each.trainable and self._groups[each.group]["use_muon"]]
        self._blocks = TensorBlocks([] if self._blockwise else matrices, self._heads, self._along)
        if self._blocks.names and ROW_AVERAGE in self.state_names:
            beta = next(each["normuon_beta"] for each in self._groups if each.get("normuon_beta") is not None)
            expected = f"needs whole rows, and tensor ranks have blocks of {min(self._blocks.names)}"
            hint = 'leave it out, or set "tp_mode": "blockwise"'
            raise ConfigError([Problem("optimizer.params.normuon_beta", beta, expected, hint)])
        return {each.fqn: self._granule(each) for each in matrices}

    def costs(self, params: Sequence[ParamSpec]) -> Mapping[str, int]:
        found = {}
        for each in params:
            group = self._groups[each.group]
            if each.trainable and group["use_muon"]:
                shape = matrices_of(each.global_shape, self._heads.get(each.fqn, 0))
                found[each.fqn] = element_cost(shape.rows, shape.columns, group["ns_steps"])
        return found

    def _granule(self, spec: ParamSpec) -> Granule:
        """What is equal on all ranks, whatever their blocks are."""
        whole = matrices_of(spec.global_shape, self._heads.get(spec.fqn, 0))
        if self._is_gathered(spec) or whole.count == 1 or len(spec.shape) > 3 or (self._blockwise and spec.cut):
            return WHOLE
        return ROW if len(spec.shape) == 3 else Granule("block", whole.numel)

    def _is_gathered(self, spec: ParamSpec) -> bool:
        return self._blocks is not None and spec.fqn in self._blocks.names

    def update(
        self, shards: Iterable[Shard], groups: Sequence[Group], grad_scale: float, communicator: Communicator
    ) -> Iterator[Shard]:
        for shard in shards:
            group = groups[shard.bucket.kind.group]
            if group["use_muon"]:
                with torch.no_grad():
                    self._update_shard(shard, group, grad_scale)
                for run in shard.runs:
                    shard.write_params(run)
            else:
                self._adam.update_shard(shard, group, grad_scale, communicator)
            yield shard

    def _update_shard(self, shard: Shard, group: Group, grad_scale: float) -> None:
        specs = {slot.param.fqn: slot.param for slot in shard.bucket.slots}
        here: list[_Update] = []
        gathered: list[tuple[ParamSpec, Tensor, Tensor]] = []
        for run in shard.runs:
            master, wanted, averages = self._begin(shard, run, group, grad_scale)
            for piece in shard.slices:
                if not run.offset <= piece.shard_offset < run.offset + run.numel:
                    continue
                window = slice(at := piece.shard_offset - run.offset, at + piece.length)
                spec = specs[piece.fqn]
                if self._is_gathered(spec):
                    gathered.append((spec, wanted[window], master[window]))
                    continue
                shape = matrices_of(spec.shape, self._heads.get(spec.fqn, 0))
                rate = -group["lr"] * shape.scale(rule_of(group))
                own = None if averages is None else averages[window]
                here.append(_Update(shape, wanted[window], master[window], rate, own))
        if gathered:
            self._update_blocks(shard.bucket.kind.cut, gathered, group)
        self._update_matrices(here, group)

    def _begin(self, shard: Shard, run: Run, group: Group, grad_scale: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """Move the momentum of a run and decay its weights; return the weights, what is to be orthogonalised, and the
        averages of rows if there are any."""
        master, gradient, _, states = shard.cut(run)
        momentum: Tensor = states[MUON_STATES[0]].raw
        grad: Tensor = gradient.raw.to(momentum.dtype)  # nothing reads it again
        if grad_scale != 1.0:
            grad.mul_(grad_scale)
        momentum.lerp_(grad, 1 - group["momentum"])
        weights: Tensor = master.raw
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        averages = states[ROW_AVERAGE].raw if ROW_AVERAGE in states else None
        return weights, grad.lerp_(momentum, group["momentum"]) if group["nesterov"] else momentum, averages

    def _update_blocks(
        self, cut: tuple[str, ...], given: Sequence[tuple[ParamSpec, Tensor, Tensor]], group: Group
    ) -> None:
        """Update blocks of matrices, of which others are on the ranks along `cut`. Collective there."""
        assert self._blocks is not None  # made with the granules
        specs = {spec.fqn: spec for spec, _, _ in given}
        costs = [spec.global_numel * self.costs([spec])[spec.fqn] for spec, _, _ in given]

        def compute(wholes: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
            done = [torch.zeros_like(whole) for _, whole in wholes]
            updates = []
            for (fqn, whole), result in zip(wholes, done, strict=True):
                shape = matrices_of(specs[fqn].global_shape, self._heads.get(fqn, 0))
                rate = -group["lr"] * shape.scale(rule_of(group))
                updates.append(_Update(shape, whole.view(-1), result.view(-1), rate))
            self._update_matrices(updates, group)
            return done

        blocks = [(spec.fqn, wanted.to(self._device)) for spec, wanted, _ in given]
        for (_, _, target), change in zip(given, self._blocks.orthogonalized(cut, blocks, costs, compute), strict=True):
            target.add_(change.to(target.device, target.dtype))

    def _update_matrices(self, updates: Sequence[_Update], group: Group) -> None:
        """Add the orthogonalised matrices to their targets, those of one shape in batches."""
        by_shape: dict[tuple[int, int, float], list[tuple[Tensor, Tensor, Tensor | None]]] = {}
        for each in updates:
            by_shape.setdefault((each.shape.rows, each.shape.columns, each.rate), []).extend(each.matrices())
        for (rows, columns, rate), members in by_shape.items():
            numel = max(1, rows * columns)
            if self._device.type == "cpu" and numel > _SMALL_NUMEL:
                for wanted, target, averages in members:
                    is_own = averages is None and self._dtype(wanted, group) is wanted.dtype
                    if is_own and add_orthogonalized(target, wanted, rate, group["ns_steps"], group["ns_method"]):
                        continue
                    _add(target, self._orthogonalized(wanted, group), averages, rate, group)
                continue
            most = max(1, _BATCH_NUMEL // numel)
            for first in range(0, len(members), most):
                part = members[first : first + most]
                changes = self._orthogonalized(torch.stack([wanted for wanted, _, _ in part]), group)
                for (_, target, averages), change in zip(part, changes, strict=True):
                    _add(target, change, averages, rate, group)

    def _orthogonalized(self, matrices: Tensor, group: Group) -> Tensor:
        dtype = self._dtype(matrices, group)
        return orthogonalize(matrices.to(self._device), group["ns_steps"], dtype, group["ns_method"])

    def _dtype(self, matrices: Tensor, group: Group) -> torch.dtype:
        return update_dtype(self._device, matrices.dtype, group.get("ns_dtype"))


def _add(target: Tensor, change: Tensor, averages: Tensor | None, rate: float, group: Group) -> None:
    """Add an orthogonalised matrix to its target, with scaled rows where there are averages of rows."""
    change = change.to(target.device, target.dtype)
    if averages is not None:
        change = scale_rows(change, averages, group["normuon_beta"])
    target.add_(change, alpha=rate)
