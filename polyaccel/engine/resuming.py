"""Saving a run and going on with it, the same for every frontend: naming its parts, comparing, reading this rank's
slices, taking over counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from polyaccel.accelerators.base import Accelerator
from polyaccel.buffer import Buffer
from polyaccel.checkpoint import TensorEntry
from polyaccel.comm.base import Communicator
from polyaccel.engine.counters import StepCounters
from polyaccel.engine.loss_scale import LossScaler
from polyaccel.engine.state import TrainedState
from polyaccel.errors import CheckpointError, ConfigError, Problem
from polyaccel.types import DType

PARAM = "param"
"""The kind of the tensors that are parameters; the others are optimizer states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """The parts of an engine whose state a checkpoint holds, whatever framework computes."""

    zero: TrainedState
    accelerator: Accelerator
    communicator: Communicator
    counters: StepCounters
    loss_scaler: LossScaler
    groups: Sequence[MutableMapping[str, Any]] | None
    """The optimizer's groups; None without an optimizer."""
    optimizer_kind: str | None
    """Equal for optimizers that understand each other's states; None without an optimizer."""
    schedule: Any
    """The learning-rate schedule; None without one."""

    def scalars(self, client_state: Mapping[str, Any]) -> dict[str, Any]:
        """The plain values of a checkpoint. Frontends replace those that differ between them."""
        groups = None if self.groups is None else {"param_groups": [hyperparameters(group) for group in self.groups]}
        return {
            "counters": self.counters.state_dict(),
            "loss_scaler": self.loss_scaler.state_dict(),
            "optimizer": groups,
            "optimizer_kind": self.optimizer_kind,
            "param_steps": self.zero.steps,
            "client_optimizer": {},
            "lr_scheduler": None,
            "data": None,
            "client_state": dict(client_state),
        }

    def resumes_optimizer(self, reader: StateReader, *, wanted: bool) -> bool:
        """Whether optimizer states are taken over: they are `wanted`, they were saved, and this run has an optimizer.

        Raises CheckpointError when the saved ones are of another kind than this run's.
        """
        if wanted:
            check_optimizer(self.optimizer_kind, reader)
        return wanted and self.groups is not None and reader.scalars["optimizer"] is not None

    def load_progress(self, reader: StateReader) -> None:
        """Take over how far the run is, and its loss scale."""
        self.counters.load_state_dict(reader.scalars["counters"])
        self.loss_scaler.load_state_dict(reader.scalars["loss_scaler"])

    def load_groups(self, reader: StateReader) -> None:
        """Take over the hyperparameters of the optimizer's groups. Raises ConfigError when their number differs."""
        if self.groups is not None:
            load_groups(self.groups, reader.scalars["optimizer"]["param_groups"])


class StateReader(Protocol):
    """A checkpoint as seen by this run's parameters."""

    tag: str
    scalars: dict[str, Any]

    def steps_of(self, fqn: str) -> int: ...

    def tensors(self) -> Sequence[TensorEntry]: ...

    def has(self, fqn: str, kind: str) -> bool: ...

    def read_into(
        self,
        fqn: str,
        kind: str,
        start: int,
        length: int,
        buffer: Buffer,
        *,
        cast_through: Callable[[int, DType], Buffer],
    ) -> None: ...


def check_names(zero: TrainedState, reader: StateReader, *, strict: bool) -> None:
    """Compare the model's parameters with the checkpoint's. Raises CheckpointError naming what differs."""
    ours = {param.fqn: param.shape for param in zero.layout.params if param.numel}
    theirs = {entry.fqn: tuple(entry.shape) for entry in reader.tensors() if entry.kind == PARAM}
    shapes = {fqn: (theirs[fqn], ours[fqn]) for fqn in ours.keys() & theirs.keys() if theirs[fqn] != ours[fqn]}
    missing, unknown = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    if shapes or (strict and (missing or unknown)):
        differences = {"other shape (saved, model)": shapes, "not saved": missing[:8], "not in the model": unknown[:8]}
        told = "; ".join(f"{what}: {which}" for what, which in differences.items() if which)
        raise CheckpointError(
            f"checkpoint {reader.tag!r} is of another model: {told}",
            cure="build the model that was saved, or say with name_map what its parameters are called there; "
            "load_module_strict=False takes what fits by name",
            value=reader.tag,
        )


def check_optimizer(kind: str | None, reader: StateReader) -> None:
    """Raise CheckpointError when the saved optimizer states are of another kind than this run's."""
    theirs = reader.scalars["optimizer_kind"]
    if kind is not None and theirs is not None and kind != theirs:
        raise CheckpointError(
            f"checkpoint {reader.tag!r} has the optimizer state of {theirs}, this run has {kind}",
            cure="build the optimizer that was saved; load_optimizer_states=False begins with a new one",
            value=theirs,
        )


def read_state(
    zero: TrainedState,
    accelerator: Accelerator,
    reader: StateReader,
    *,
    optimizer_states: bool,
    counts_updates: bool,
    may_lack_states: bool = False,
) -> None:
    """Read the pieces that this rank needs, forget all gradients, and make the parameters whole everywhere. Collective.

    `counts_updates`: each parameter's number of updates is taken over too. `may_lack_states`: an optimizer state that
    was not saved is none.
    """
    is_whole = optimizer_states
    for slot, kind, start, buffer in zero.needed_pieces():
        fqn = slot.param.fqn
        may_lack = kind == PARAM or may_lack_states
        if (kind == PARAM or optimizer_states) and (reader.has(fqn, kind) or not may_lack):
            reader.read_into(fqn, kind, start, buffer.numel, buffer, cast_through=accelerator.allocate)
        elif kind == PARAM:
            is_whole = False
    zero.discard_gradients()
    if is_whole:
        zero.mend()
    if counts_updates:  # before master weights are rounded, which depends on it
        zero.steps.update({fqn: reader.steps_of(fqn) for fqn in zero.steps})
    zero.params.publish_masters()


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def load_groups(groups: Sequence[MutableMapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Take over the hyperparameters of saved groups. Raises ConfigError when their number differs."""
    if len(groups) != len(saved):
        expected = f"the checkpoint has {len(saved)} optimizer groups"
        raise ConfigError([Problem("optimizer.param_groups", len(groups), expected, "build the same groups")])
    for group, values in zip(groups, saved, strict=True):
        group.update({key: tuple(value) if key == "betas" else value for key, value in values.items()})
