"""Save and resume a run, for every frontend: names of its parts, comparison, reads of slices, counters.

[Note: All-or-nothing load]
A load changes nothing on any rank before every rank has found all that it is going to take over: names and shapes fit,
plain values are what their owners take, and every piece of a file that will be read has its checksum. Only then does it
bring the pieces into the buffers of the engine: from the memory that they were verified in where they all fit, else by
a second reading, verified too ([Note: Two-pass load] in `checkpoint.load.cooperative.reading`). What fails there (a
file that changed in between, a rank that is lost) leaves states of two checkpoints, which are neither trained nor saved
until a load has succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from polyaccel.accelerators.base import Accelerator
from polyaccel.checkpoint import CheckpointReader, TensorEntry, list_checkpoints
from polyaccel.checkpoint.collective_call import on_rank_0, run_on_all
from polyaccel.checkpoint.format.tensors import PARAM
from polyaccel.checkpoint.load.name_map import ReadItem
from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.tagged_json import bytes_in
from polyaccel.core.types import DType
from polyaccel.engine.counters import StepCounters
from polyaccel.engine.groups import SavedGroups, hyperparameters, load_groups, match_groups
from polyaccel.engine.loss_scale import LossScaler
from polyaccel.errors import CheckpointError
from polyaccel.zero.plan.layout import Slot
from polyaccel.zero.plan.policy import COPIES_OF_WEIGHTS, ENGINE_STATES
from polyaccel.zero.trained_state import TrainedState, over_stages


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
    model_parallel_group: Communicator | None = None
    """Process group of the other pipeline stages, or None without pipeline parallelism."""
    loading_nbytes: int | None = None
    """The memory that this rank may use for what a load keeps between verifying and taking over; None: its share of
    half of what the host has left."""

    def scalars(self, client_state: Any, *, may_have_bytes: bool) -> dict[str, Any]:
        """Return a checkpoint's plain values; frontends replace some. Collective where there are stages."""
        if not isinstance(client_state, Mapping):
            kind = type(client_state).__name__
            hint = 'give a dict of plain values, such as {"epoch": 3}'
            raise CheckpointError(f"client_state is a {kind}, not a dict", hint=hint, value=kind)
        if not may_have_bytes and (where := bytes_in(client_state, "client_state")):
            raise CheckpointError(
                f"{where} is bytes: a checkpoint holds plain values and tensors, which run nothing when they are read",
                hint='keep what they stand for; "checkpoint": {"allow_bytes": true} lets bytes in, which must not be '
                "unpickled",
                value=where,
            )
        return {
            "counters": self.counters.state_dict(),
            "loss_scaler": self.loss_scaler.state_dict(),
            "optimizer": self._saved_groups(),
            "optimizer_kind": self.optimizer_kind,
            "param_steps": self.zero.steps,
            "client_optimizer": {},
            "lr_scheduler": None,
            "data": None,
            "client_state": dict(client_state),
        }

    def _saved_groups(self) -> dict[str, Any] | None:
        """The optimizer's groups with the names of their parameters; without names where one group has all."""
        members = self.members()
        if self.groups is None:
            return None
        saved: dict[str, Any] = {"param_groups": [hyperparameters(group) for group in self.groups]}
        if len(self.groups) > 1:
            saved["param_names"] = [
                [fqn for fqn, index in members.items() if index == group] for group in range(len(self.groups))
            ]
        return saved

    def members(self) -> dict[str, int | None]:
        """Return every parameter with its optimizer group, None if frozen. Collective where there are stages."""
        params = self.zero.layout.params
        return over_stages(
            self.model_parallel_group, {param.fqn: param.group if param.trainable else None for param in params}
        )

    def match_groups(
        self, reader: StateReader, saved: SavedValues, members: Mapping[str, int | None], *, wanted: bool
    ) -> list[int | None] | None:
        """Find the saved group of each of the optimizer's groups, which hold `members`. None where optimizer states are
        not taken over: they are not `wanted`, were not saved, or this run has no optimizer.

        Raises CheckpointError when the saved ones are of another kind than this run's, and what `match_groups` of
        `engine.groups` raises.
        """
        if not wanted:
            return None
        kind, theirs = self.optimizer_kind, saved.optimizer_kind
        if kind is not None and theirs is not None and kind != theirs:
            raise CheckpointError(
                f"checkpoint {reader.tag!r} has the optimizer state of {theirs}, this run has {kind}",
                hint="build the optimizer that was saved; load_optimizer_states=False begins with a new one",
                value=theirs,
            )
        if self.groups is None or saved.optimizer is None:
            return None
        return match_groups(self.groups, saved.optimizer, members, reader.saved_name)

    def check_progress(self, saved: SavedValues) -> None:
        """Raise CheckpointError for counts and a loss scale that `load_progress` could not take over."""
        validate_state_dict(self.counters, saved.counters)
        validate_state_dict(self.loss_scaler, saved.loss_scaler)

    def load_progress(self, saved: SavedValues) -> None:
        """Take over how far the run is, and its loss scale."""
        self.counters.load_state_dict(saved.counters)
        self.loss_scaler.load_state_dict(saved.loss_scaler)

    def load_groups(self, saved: SavedValues, sources: Sequence[int | None]) -> None:
        """Take over the hyperparameters of the optimizer's groups from the saved ones at `sources`."""
        if self.groups is not None and saved.optimizer is not None:
            load_groups(self.groups, saved.optimizer.param_groups, sources)

    def load_together(self, saved: CheckpointReader, check: Callable[[], LoadPlan]) -> None:
        """Take over the checkpoint `saved` on all ranks or on none; gradients are forgotten. Collective.

        `check` changes nothing, and raises for whatever would make the takeover fail. See [Note: All-or-nothing load].
        Raises CheckpointError on every rank, whichever rank refused.
        """
        tag, found = saved.tag, list[LoadPlan]()
        step = f"loading {tag!r} (nothing was changed)"
        with ExitStack() as stack:
            try:
                reading = stack.enter_context(saved.together(self.communicator, step, most_nbytes=self.loading_nbytes))
                run_on_all(self.communicator, step, lambda: found.append(check()))
                reading.verify(step)
            except CheckpointError as error:
                raise self._refusal(saved, error) from error
            takeover = found[0]
            with self.zero.consistency.changing(f"loading {tag!r}"):
                reading.load(f"taking over {tag!r}", takeover.read)
                self.zero.discard_gradients()
                self.zero.steps.update(takeover.steps)  # before master weights are rounded, which depends on it
                self.zero.params.all_gather_masters()
            if takeover.is_whole:
                self.zero.consistency.mark_consistent()

    def _refusal(self, saved: CheckpointReader, error: CheckpointError) -> CheckpointError:
        """`error` with the other checkpoints that there are."""

        def others() -> list[str]:
            return [
                checkpoint.tag
                for checkpoint in list_checkpoints(saved.storage)
                if checkpoint.is_good and checkpoint.tag != saved.tag
            ]

        tags = ", ".join(on_rank_0(self.communicator, "listing checkpoints", others)) or "none"
        message = f"{error.message}\n  other complete checkpoints there, newest first: {tags}"
        return CheckpointError(message, hint=error.hint, value=error.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What a load will do on this rank, once every rank has checked its part.

    `read` brings everything here, without collective calls. `is_whole`: all parameters and optimizer states are among
    it. `steps` has the number of updates of the parameters whose optimizer states are.
    """

    read: Callable[[], None]
    is_whole: bool
    steps: Mapping[str, int]


class SavedValues(BaseModel):
    """The plain values of a checkpoint, as `TrainingRun.scalars` gives them, checked."""

    model_config = ConfigDict(strict=True, frozen=True)

    counters: dict[str, Any]
    loss_scaler: dict[str, Any]
    optimizer: SavedGroups | None
    optimizer_kind: str | None
    param_steps: dict[str, NonNegativeInt]
    client_optimizer: dict[str, dict[str, float]]
    lr_scheduler: dict[str, Any] | None
    data: dict[str, Any] | None
    client_state: dict[str, Any]
    frozen_base: dict[str, str] = {}
    """The `base_checksums` of frozen parameters that were left out."""

    @classmethod
    def from_reader(cls, reader: StateReader) -> SavedValues:
        """Read the values. Raises CheckpointError naming each one that is missing or of another type."""
        try:
            return cls.model_validate(reader.scalars)
        except ValidationError as error:
            what = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:8])
            raise CheckpointError(
                f"the plain values of checkpoint {reader.tag!r} are not those of a training run: {what}",
                hint="load another tag",
                value=reader.tag,
            ) from error


def validate_state_dict(part: Any, saved: Mapping[str, Any]) -> None:
    """Raise what `part.load_state_dict(saved)` would raise; `part` stays as it is, and so do its optimizer's groups."""
    trial = copy(part)
    if hasattr(trial, "optimizer"):
        trial.optimizer = SimpleNamespace(param_groups=[dict(group) for group in trial.optimizer.param_groups])
    trial.load_state_dict(saved)


class StateReader(Protocol):
    """A checkpoint as seen by this run's parameters."""

    tag: str
    scalars: dict[str, Any]

    def steps_of(self, fqn: str) -> int: ...

    def was_trained(self, fqn: str) -> bool: ...

    def saved_name(self, fqn: str) -> str: ...

    def tensors(self) -> Sequence[TensorEntry]: ...

    def has(self, fqn: str, kind: str) -> bool: ...

    def verify(self, item: ReadItem) -> None: ...

    def read_into(self, item: ReadItem, buffer: Buffer, cast_through: Callable[[int, DType], Buffer]) -> None: ...


def check_names(
    zero: TrainedState,
    reader: StateReader,
    *,
    strict: bool,
    left_out: Collection[str] = frozenset(),
    elsewhere: Collection[str] = frozenset(),
) -> None:
    """Compare names with the checkpoint's, except `left_out` and `elsewhere`. Raises CheckpointError."""
    ours = {param.fqn: param.global_shape for param in zero.layout.params if prod(param.global_shape)}
    theirs = {entry.fqn: tuple(entry.shape) for entry in reader.tensors() if entry.kind == PARAM}
    shapes = {fqn: (theirs[fqn], ours[fqn]) for fqn in ours.keys() & theirs.keys() if theirs[fqn] != ours[fqn]}
    available = (ours.keys() | set(elsewhere)) & theirs.keys()
    if theirs and ours and not available and not strict:
        raise CheckpointError(
            f"checkpoint {reader.tag!r} has no parameter of this model: it has {', '.join(sorted(theirs)[:4])}, "
            f"the model {', '.join(sorted(ours)[:4])}",
            hint="name_map gives the names under which the parameters were saved",
            value=reader.tag,
        )
    missing, unknown = (
        sorted(ours.keys() - theirs.keys() - set(left_out)),
        sorted(theirs.keys() - ours.keys() - set(elsewhere)),
    )
    if shapes or (strict and (missing or unknown)):
        differences = {"other shape (saved, model)": shapes, "not saved": missing[:8], "not in the model": unknown[:8]}
        summary = "; ".join(f"{what}: {which}" for what, which in differences.items() if which)
        raise CheckpointError(
            f"checkpoint {reader.tag!r} is of another model: {summary}",
            hint="build the model with the saved shapes, or write what fits with custom_load_fn"
            if shapes
            else "build the model that was saved, or map its parameters to their names there with name_map; "
            "load_module_strict=False takes what fits by name",
            value=reader.tag,
        )


@dataclass(frozen=True, slots=True)
class WantedState:
    """The part of a checkpoint that this rank takes over; `kept` are the parameters of which something stays as it is,
    `fresh` the optimizer states, by kind, of those that were frozen when they were saved: they begin again."""

    pieces: Sequence[tuple[ReadItem, Buffer]]
    """Each with the buffer that takes it."""
    kept: Sequence[str]
    fresh: Sequence[tuple[Slot, Mapping[str, Buffer]]]

    def verify(self, reader: StateReader) -> None:
        """Raise CheckpointError where a checksum is wrong, or a type cannot be converted."""
        for item, _ in self.pieces:
            reader.verify(item)

    def read(self, reader: StateReader, accelerator: Accelerator) -> None:
        """Overwrite the buffers."""
        for item, buffer in self.pieces:
            reader.read_into(item, buffer, accelerator.allocate)

    def begin_fresh(self, run: TrainingRun) -> None:
        """Let the optimizer of `run` begin again where nothing was saved because there was nothing."""
        optimizer, groups = run.zero.optimizer, run.groups
        if optimizer is not None and groups is not None:
            for slot, states in self.fresh:
                for state in states.values():
                    state.fill(0.0)
                optimizer.initialise_states(states, groups[slot.param.group], slot.param)


def wanted_state(
    zero: TrainedState,
    reader: StateReader,
    *,
    optimizer_states: bool,
    strict: bool,
    may_lack_states: bool = False,
    left_out: Collection[str] = frozenset(),
) -> WantedState:
    """The pieces that this rank needs. Parameters that the checkpoint has `left_out` are what they have to be.
    `may_lack_states`: an optimizer state that was not saved is absent. A parameter that was frozen when it was saved
    has none either, and begins again.

    Without `strict`, a parameter that was not saved keeps its value and its optimizer states, and one that was saved
    without a state keeps that. Raises CheckpointError naming the states that are missing.
    """
    pieces, kept, missing = list[tuple[ReadItem, Buffer]](), dict[str, None](), list[str]()
    fresh = dict[tuple[str, int], tuple[Slot, dict[str, Buffer]]]()
    for slot, kind, start, buffer in zero.shards_to_load():
        fqn = slot.param.fqn
        is_engines = kind in ENGINE_STATES
        if kind in COPIES_OF_WEIGHTS and not (optimizer_states and reader.has(fqn, kind)):
            kind = PARAM  # such a state begins at the weights
        if kind != PARAM and not optimizer_states:
            continue
        if reader.has(fqn, kind):
            item = ReadItem(fqn, kind, start, buffer.numel, buffer.dtype, slot.param.block)
            pieces.append((item, buffer))
        elif not reader.has(fqn, PARAM):
            if fqn not in left_out:
                kept[fqn] = None
        elif may_lack_states or is_engines:
            continue
        elif not reader.was_trained(fqn):
            fresh.setdefault((fqn, start), (slot, {}))[1][kind] = buffer
        elif strict:
            missing.append(f"{kind!r} of {fqn!r}")
        else:
            kept[fqn] = None
    if missing:
        raise CheckpointError(
            f"checkpoint {reader.tag!r} holds no {', '.join(missing[:8])}",
            hint="load_optimizer_states=False begins with a new optimizer, "
            "load_module_strict=False leaves alone what was not saved",
            value=missing,
        )
    pieces.sort(key=lambda piece: (reader.saved_name(piece[0].fqn), piece[0].kind, piece[0].start))  # as stored
    return WantedState(pieces, tuple(kept), tuple(fresh.values()))
