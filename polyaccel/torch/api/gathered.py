"""Full values of sharded parameters for a while: `GatheredParameters`, and `unwrap_model_for_generation` for all at
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from polyaccel.errors import ShardingError
from polyaccel.torch.sharding.ownership import ParameterOwner, has_changed, is_handed_out, note_version, record_of
from polyaccel.torch.sharding.units import register_external_parameter


@dataclass(eq=False)
class _Opening:
    """The parameters of one engine that are open: `fqns` were asked for, `neighbours` share their buckets and became
    whole too."""

    owner: ParameterOwner
    fqns: list[str]
    buckets: list[int]
    neighbours: list[str]
    notes: saved_tensors_hooks | None = None
    """In force while it is open, so that a graph which is built inside finds the parameters in its backward pass."""

    def changed(self) -> list[str]:
        """Names of the parameters that the user wrote to on this rank."""
        writes = self.owner.step.user_writes
        known = {*writes.modified()}
        return [
            fqn
            for fqn in (*self.fqns, *self.neighbours)
            if fqn in known
            or has_changed(self.owner.parameter(fqn))
            or (self.owner.checks_contents and writes.differs(fqn))
        ]

    def handed_out(self) -> list[str]:
        """Names of the parameters that this rank may have written to without a trace."""
        return [fqn for fqn in (*self.fqns, *self.neighbours) if is_handed_out(self.owner.parameter(fqn))]


class GatheredParameters:
    """Context in which sharded parameters are unsharded, to be read or changed. DeepSpeed's name and arguments.

    Collective: every rank enters and leaves it with the same arguments. It works at every stage, contexts nest, and one
    may be entered again. What is computed from the parameters inside may enter a loss.

    With `modifier_rank`, leaving the context broadcasts what that rank wrote into `params`, and master weights follow.
    Without it a change raises ShardingError on every rank, and sharded parameters keep their old values. Changes are
    found by version counters. They are found by values for parameters whose `.data` or numpy array was taken, and for
    all parameters with `zero_optimization.enable_sanity_checks`. An exception that leaves the context writes nothing
    back.

    Args:
        params: A parameter, or an iterable of them. Those that belong to no engine are left alone.
        modifier_rank: Rank whose changes count, within the engine's ranks. None allows no change.
        fwd_module: Module that will also gather `params` in its forward pass from now on, as with
            `register_external_parameter`.
        enabled: False makes the context do nothing.

    Raises:
        ShardingError: On leaving: a parameter was changed without `modifier_rank`, or is not among `params`; the
            message names it. On entering: `modifier_rank` does not exist.

    Example:
        ```python
        weight = engine.module[0].weight
        with polyaccel.zero.GatheredParameters(weight, modifier_rank=0):
            if polyaccel.comm.get_rank() == 0:
                weight.data.clamp_(-0.2, 0.2)
        ```
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, Tensor) else list(params)
        self._params = [param for param in given if isinstance(param, nn.Parameter)] if enabled else []
        self._modifier_rank = modifier_rank
        self._open: list[list[_Opening]] = []
        if fwd_module is not None:
            for param in self._params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        openings = self._openings()
        self._open.append(openings)
        for opening in openings:
            params = opening.owner.step.params
            if any(index not in params.gathered for index in opening.buckets):
                opening.owner.adopt_changes()
            for index in opening.buckets:
                params.unshard(index)
            for fqn in (*opening.fqns, *opening.neighbours):
                _open(opening.owner, fqn)
            opening.notes = opening.owner.sharding.saved_tensor_hooks()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        openings = self._open.pop()
        for opening in reversed(openings):
            if opening.notes is not None:
                opening.notes.__exit__(None, None, None)
        try:
            if kind is None:
                for opening in openings:
                    self._write_back(opening)
        finally:
            for opening in openings:
                _close(opening)

    def _openings(self) -> list[_Opening]:
        """The parameters to open, engine by engine, in the engine's own order, which is the same on every rank."""
        asked: dict[ParameterOwner, set[str]] = {}
        for param in self._params:
            home = record_of(param)
            if home is not None and home.owner is not None:
                asked.setdefault(home.owner, set()).add(home.fqn)
        openings = []
        for owner, names in sorted(asked.items(), key=lambda pair: pair[0].engine_number):
            step = owner.step
            ranks = step.communicator.world_size
            if self._modifier_rank is not None and not 0 <= self._modifier_rank < ranks:
                raise ShardingError(
                    f"modifier_rank {self._modifier_rank} is none of the {ranks} ranks",
                    hint=f"use 0 to {ranks - 1}",
                    value=self._modifier_rank,
                )
            fqns = sorted(names, key=step.layout.position.__getitem__)
            buckets = sorted({step.layout.locate(fqn)[0].index for fqn in fqns})
            members = [
                slot.param.fqn
                for index in buckets
                if index in step.params.gathered
                for slot in step.layout.buckets[index].slots
            ]
            openings.append(_Opening(owner, fqns, buckets, [fqn for fqn in members if fqn not in names]))
        return openings

    def _write_back(self, opening: _Opening) -> None:
        """Broadcast the changes of the modifier rank. Raises ShardingError on all ranks for a change by anybody
        else."""
        step = opening.owner.step
        may_change = set() if self._modifier_rank is None else set(opening.fqns)
        changes = step.communicator.all_gather_object((opening.changed(), opening.handed_out()))
        suspects = dict.fromkeys(fqn for _, names in changes for fqn in names if fqn not in may_change)
        written = step.user_writes.writers(list(suspects))
        for rank, (changed, _) in enumerate(changes):
            strangers = sorted({*changed, *written[rank]} - may_change)
            if strangers:
                raise _changed_in_vain(strangers, rank, asked_for=strangers[0] in opening.fqns)
        if self._modifier_rank is None:
            return
        step.user_writes.broadcast(opening.fqns, self._modifier_rank)
        for fqn in opening.fqns:
            step.user_writes.adopt(fqn)
            note_version(opening.owner.parameter(fqn))
        opening.owner.on_update()


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Unshard all parameters of a model, so that ranks may generate texts of different lengths. TRL's name.

    Collective on entering. Nothing is exchanged inside. It needs memory for the whole model;
    `stage3_max_live_parameters` does not bound it. `engine.generate` gathers unit by unit where memory is short.

    Args:
        model: An engine, or a module that an engine trains.

    Yields:
        The module, without the engine.
    """
    own = model._modules.get("module")
    inner = own if own is not None and hasattr(model, "zero_optimization_stage") else model
    with GatheredParameters(inner.parameters()):
        yield inner


def _open(owner: ParameterOwner, fqn: str) -> None:
    """Note where a parameter's changes start, unless it is open already."""
    parameter = owner.parameter(fqn)
    home = record_of(parameter)
    assert home is not None  # it was found by it
    if home.openings == 0:
        if has_changed(parameter):  # written to while it was kept whole between two uses
            owner.step.user_writes.adopt(fqn)
        note_version(parameter)
    home.openings += 1


def _close(opening: _Opening) -> None:
    owner = opening.owner
    for fqn in (*opening.fqns, *opening.neighbours):
        parameter = owner.parameter(fqn)
        home = record_of(parameter)
        if home is not None:
            home.openings -= 1
            if home.openings == 0 and owner.is_sharded(fqn):
                note_version(parameter)  # a change that was refused is reported once
    for index in opening.buckets:
        owner.step.params.reshard(index)


def _changed_in_vain(names: list[str], rank: int, *, asked_for: bool) -> ShardingError:
    if asked_for:
        what, hint = "without a modifier rank", "pass modifier_rank=, the rank whose changes count"
    else:
        what, hint = "although it was not among the given parameters", "pass it to GatheredParameters too"
    return ShardingError(
        f"parameter {names[0]!r} was changed on rank {rank} inside GatheredParameters {what}", hint=hint, value=names
    )
