"""A torch engine's state to and from a checkpoint: slices from the step, buffers from the module, the rest as plain
values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from polyaccel.accelerators.memory.torch import dtype_of
from polyaccel.checkpoint import CheckpointReader, TensorPiece
from polyaccel.checkpoint.saver import Saver
from polyaccel.checkpoint.tensors import PARAM
from polyaccel.checkpoint.views.given_values import BUFFER, GivenReader
from polyaccel.checkpoint.views.name_map import NameMap, RenamedReader
from polyaccel.engine.frozen_base import base_checksums
from polyaccel.engine.lr_schedules import Schedule
from polyaccel.engine.resuming import SavedValues, Takeover, TrainingRun, check_names, try_out, wanted_state
from polyaccel.errors import CheckpointError
from polyaccel.plain import is_plain
from polyaccel.torch.adapter import TorchAdapter
from polyaccel.torch.api.client_optimizer import ClientOptimizer
from polyaccel.torch.api.data import ShardedDataLoader
from polyaccel.torch.packing import packed, unpacked
from polyaccel.torch.params.buffers import plain_values
from polyaccel.torch.states.custom_loading import CustomLoad, CustomLoading
from polyaccel.torch.states.extra_states import (
    extra_state_blobs,
    saved_extra_states,
    set_extra_states,
)
from polyaccel.torch.states.random_states import RandomStates
from polyaccel.torch.states.saved_buffers import Reader, module_buffers, read_buffer, saved_buffers
from polyaccel.types import DType, ParamSpec
from polyaccel.zero.step import ZeroStep
from polyaccel.zero.update.optimizers import SliceOptimizer

log = getLogger(__name__)

_CLIENT_OPTIMIZER, _CLIENT_SCHEDULE, _CLIENT_STATE = "client_optimizer", "client_schedule", "client_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRun(TrainingRun):
    """The parts of a torch engine whose state a checkpoint holds."""

    zero: ZeroStep
    adapter: TorchAdapter
    data: ShardedDataLoader[Any] | None
    """The engine's own loader of training data."""


def save_run(
    run: TorchRun,
    saver: Saver,
    location: str,
    tag: str,
    *,
    client_state: Mapping[str, Any],
    exclude_frozen: bool,
    save_latest: bool,
) -> None:
    """Let `saver` write the whole state of `run`. Collective. Raises PolyaccelError after half an update, and
    CheckpointError for a state of a client's optimizer that cannot be saved."""
    run.zero.require_whole()
    run.zero.params.fence()
    optimizer = run.zero.optimizer
    blobs = RandomStates.now(run.accelerator).to_blobs()
    scalars = run.scalars(client_state, may_have_bytes=saver.policy.allows_bytes)
    if exclude_frozen:
        frozen = {param.fqn for param in run.zero.layout.params if _is_left_out(param)}
        scalars["frozen_base"] = base_checksums(run.zero, run.communicator, frozen)
    if not is_plain(scalars["client_state"]):
        blobs[_CLIENT_STATE] = packed(scalars.pop("client_state"), "client_state")
        scalars["client_state"] = {name: value for name, value in client_state.items() if is_plain({name: value})}
    if isinstance(optimizer, ClientOptimizer):
        kinds = optimizer.states_by_kind()
        for numbers, others in run.communicator.all_gather_object((kinds.numbers, kinds.others)):
            if others:
                fqn, name = others[0]
                raise CheckpointError(
                    f"the optimizer keeps a state {name!r} of parameter {fqn!r} that is neither a number nor has a "
                    "value for each element, and checkpoints of an optimizer that runs on slices have no place for it",
                    cure='keep it outside of optimizer.state and save it by client_state, or use "stage": 0',
                    value=name,
                )
            scalars["client_optimizer"].update(numbers)
        whole = optimizer.whole_state()
        if whole is not None:
            blobs[_CLIENT_OPTIMIZER] = whole
    if isinstance(run.schedule, Schedule):
        scalars["lr_scheduler"] = run.schedule.state_dict()
    elif run.schedule is not None:
        blobs[_CLIENT_SCHEDULE] = packed(run.schedule.state_dict(), "the state of the learning-rate schedule")
    if run.data is not None:
        scalars["data"] = run.data.state_dict()
    blobs |= extra_state_blobs(run.adapter.module)
    saver.save(
        location,
        tag,
        pieces=lambda: _pieces(run, exclude_frozen),
        scalars=scalars,
        rank_blobs=blobs,
        save_latest=save_latest,
    )


def load_run(
    run: TorchRun,
    saved: CheckpointReader,
    *,
    strict: bool,
    optimizer_states: bool,
    schedule: bool,
    module_only: bool,
    name_map: NameMap | None,
    custom: CustomLoad | None = None,
) -> tuple[str, dict[str, Any]]:
    """Take over a checkpoint's state. Collective. Returns its path and the client state. `custom` writes the module's
    tensors, see [Note: A user's own loading] in `checkpoint.views.given_values`.

    Raises CheckpointError on every rank for one that any rank refuses, and leaves `run` as it was.
    """
    run.zero.params.fence()
    base, loading = {}, CustomLoading.prepare(custom, run.adapter, run.zero)
    if strict and loading is None and (saved.scalars.get("frozen_base")):
        names = {param.fqn for param in run.zero.layout.params}
        base = base_checksums(run.zero, run.communicator, names - {entry.fqn for entry in saved.tensors()})

    def check() -> Takeover:
        return _check(
            run,
            saved,
            base,
            strict=strict,
            optimizer_states=optimizer_states,
            schedule=schedule,
            module_only=module_only,
            name_map=name_map,
            loading=loading,
        )

    run.load_together(saved, check)
    return f"{saved.storage.location}/{saved.tag}", client_state_of(saved)


def client_state_of(saved: CheckpointReader) -> dict[str, Any]:
    """The client state of a checkpoint. Raises CheckpointError for one that cannot be read."""
    whole = saved.rank_blobs(0).get(_CLIENT_STATE)
    state = saved.scalars["client_state"] if whole is None else unpacked(whole, "client_state")
    return dict(state)


def frozen_with_states(run: TorchRun, saved: CheckpointReader, name_map: NameMap | None) -> frozenset[str]:
    """The members of the optimizer's groups that are laid out as frozen here, and were trained when `saved` was
    written: their states are there. Those of others, which this run cannot train, are said to be left out.

    None for a checkpoint that is refused later, or has another optimizer's states.
    """
    adapter = run.adapter
    try:
        reader = RenamedReader(saved, name_map, {param.fqn: param.global_shape for param in run.zero.layout.params})
        values = SavedValues.of(reader)
    except CheckpointError:
        return frozenset()
    if run.groups is None or values.optimizer is None or values.optimizer_kind != run.optimizer_kind:
        return frozenset()
    found = {fqn for fqn in adapter.names.values() if not adapter.is_trained(fqn) and reader.was_trained(fqn)}
    if (left := sorted(found - adapter.frozen_members.keys())) and run.communicator.rank == 0:
        names = ", ".join(left[:8])
        log.warning(
            "the checkpoint has optimizer states of %d frozen parameters that are in no group of this run's optimizer; "
            "they are left out: %s", len(left), names,
        )  # fmt: skip
    return frozenset(found & adapter.frozen_members.keys())


def _check(
    run: TorchRun,
    saved: CheckpointReader,
    base: Mapping[str, str],
    *,
    strict: bool,
    optimizer_states: bool,
    schedule: bool,
    module_only: bool,
    name_map: NameMap | None,
    loading: CustomLoading | None,
) -> Takeover:
    """Check and verify what this rank will take over from `saved`; see [Note: A refused load] in `engine.resuming`.
    `base` has the checksums of parameters that `saved` may have left out."""
    shapes = {param.fqn: param.global_shape for param in run.zero.layout.params}
    renamed = RenamedReader(saved, name_map, shapes)
    reader: Reader = renamed
    values = SavedValues.of(reader)
    if loading is None:
        left_out: Collection[str] = _same_base(renamed, values, base) if strict else frozenset()
        check_names(run.zero, reader, strict=strict, left_out=left_out)
    else:
        given = loading.values(run.adapter, saved, run.accelerator.allocate, renamed.saved_name)
        given.check({param.fqn: param.shape for param in run.zero.layout.params})
        reader, left_out = GivenReader(renamed, given, shapes), given.untouched
    client = run.zero.optimizer if isinstance(run.zero.optimizer, ClientOptimizer) else None
    resumes_optimizer = run.resumes_optimizer(reader.tag, values, wanted=optimizer_states)
    if resumes_optimizer and client is not None:
        _allocate_client_states(run.zero, reader)
    wanted = wanted_state(
        run.zero,
        reader,
        optimizer_states=optimizer_states,
        strict=strict,
        may_lack_states=client is not None,
        left_out=left_out,
    )
    if wanted.kept and run.communicator.rank == 0:
        names = ", ".join(wanted.kept[:8])
        log.warning("%d parameters or their states were not saved and stay as they are: %s", len(wanted.kept), names)
    buffers = saved_buffers(run.adapter, reader)
    blobs = reader.rank_blobs(0)
    client_state_of(saved)
    extra_states = saved_extra_states(run.adapter.module, blobs)
    random_states = None
    if not module_only:
        run.check_progress(values)
        random_states = _saved_random_states(run, reader)
        if run.data is not None and values.data is not None:
            try_out(run.data, values.data)
    of_optimizer = blobs.get(_CLIENT_OPTIMIZER) if resumes_optimizer else None
    if client is not None and of_optimizer is not None:
        client.check_whole_state(of_optimizer)
    of_schedule = _saved_schedule(run.schedule, values, blobs) if schedule else None
    if of_schedule is not None:
        try_out(run.schedule, of_schedule)
    wanted.verify(reader)

    def read() -> None:
        wanted.read(reader, run.accelerator)
        for name, tensor in buffers.items():
            read_buffer(run.accelerator, reader, name, tensor)
        set_extra_states(run.adapter.module, extra_states)
        if not module_only:
            run.load_progress(values)
            if run.data is not None and values.data is not None:
                run.data.load_state_dict(values.data)
        if random_states is not None:
            random_states.restore(run.accelerator)
        if resumes_optimizer:
            wanted.begin_fresh(run)
            run.load_groups(values)
            if client is not None:
                client.restore(run.zero.shards, values.client_optimizer, reader.has)
                if of_optimizer is not None:
                    client.load_whole_state(of_optimizer)
        if of_schedule is not None:
            run.schedule.load_state_dict(of_schedule)

    return Takeover(
        read=read,
        is_whole=optimizer_states and not wanted.kept,
        steps={fqn: reader.steps_of(fqn) for fqn in run.zero.steps if reader.has(fqn, PARAM)}
        if resumes_optimizer
        else {},
    )


def _pieces(run: TorchRun, exclude_frozen: bool) -> Iterator[TensorPiece]:
    optimizer = run.zero.optimizer
    shards = {slot.param.fqn: shard for shard in run.zero.shards for slot in shard.bucket.slots}
    for slot, kind, start, buffer in run.zero.owned_pieces():
        fqn = slot.param.fqn
        # A shard's buffer of a state has room for parameters that have no such state.
        exists = kind == PARAM or not isinstance(optimizer, ClientOptimizer) or optimizer.holds(shards[fqn], fqn, kind)
        if exists and not (exclude_frozen and _is_left_out(slot.param)):
            param = slot.param
            yield TensorPiece(fqn, kind, param.global_shape, buffer.dtype, start, buffer, param.block)
    if run.communicator.rank == 0:
        for name, tensor in module_buffers(run.adapter).items():
            values = plain_values(tensor)
            yield TensorPiece(
                name, BUFFER, tuple(values.shape), dtype_of(values.dtype), 0, run.accelerator.wrap(values)
            )


def _same_base(reader: RenamedReader, values: SavedValues, base: Mapping[str, str]) -> frozenset[str]:
    """The parameters that the checkpoint left out and this model has, with the same bits.

    Raises CheckpointError naming those that have others.
    """
    left_out = {fqn: saved for fqn in base if (saved := values.frozen_base.get(reader.saved_name(fqn)))}
    others = {fqn: (saved, base[fqn]) for fqn, saved in left_out.items() if saved != base[fqn]}
    if others:
        told = ", ".join(f"{fqn} ({saved}, here {ours})" for fqn, (saved, ours) in list(others.items())[:8])
        raise CheckpointError(
            f"checkpoint {reader.tag!r} left out {len(others)} frozen parameters that this model has with other values "
            f"(type and checksum): {told}",
            cure="begin with the weights that the saved run began with; load_module_strict=False goes on with these",
            value=sorted(others),
        )
    return frozenset(left_out)


def _is_left_out(param: ParamSpec) -> bool:
    """Whether `exclude_frozen` leaves a parameter out."""
    return not param.trainable and param.block is None


def optimizer_kind(optimizer: SliceOptimizer | None) -> str | None:
    """The kind of optimizer whose states those of `optimizer` are; None without one."""
    return None if optimizer is None else optimizer.kind


def _allocate_client_states(zero: ZeroStep, reader: Reader) -> None:
    saved: dict[str, list[tuple[str, DType]]] = {}
    for entry in reader.tensors():
        if entry.kind not in (PARAM, BUFFER):
            saved.setdefault(entry.fqn, []).append((entry.kind, entry.dtype))
    for shard in zero.shards:
        for piece in shard.slices:
            for kind, dtype in saved.get(piece.fqn, ()):
                if kind not in shard.states:
                    shard.allocate_state(kind, dtype)


def _saved_schedule(schedule: Any, values: SavedValues, blobs: Mapping[str, bytes]) -> Mapping[str, Any] | None:
    """The saved state of this run's schedule; None without one. Raises CheckpointError for what is none."""
    if schedule is None or isinstance(schedule, Schedule):
        return None if schedule is None else values.lr_scheduler
    if _CLIENT_SCHEDULE not in blobs:
        return None
    state = unpacked(blobs[_CLIENT_SCHEDULE], "the state of the learning-rate schedule")
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise CheckpointError(f"the saved state of the learning-rate schedule is a {kind}", cure="load another tag")
    return state


def _saved_random_states(run: TorchRun, reader: Reader) -> RandomStates | None:
    """The states that this rank's generators go on from; None where they keep their own."""
    if reader.world_size != run.communicator.world_size:
        log.warning(
            "random generators keep their present states: they were saved on %d ranks, this is a run of %d",
            reader.world_size, run.communicator.world_size,
        )  # fmt: skip
        return None
    blobs = reader.rank_blobs(run.communicator.rank)
    if "rng.torch" not in blobs:
        log.warning("random generators keep their present states: another framework saved the checkpoint")
        return None
    states = RandomStates.from_blobs(blobs, run.accelerator)
    if states.accelerator is None and run.communicator.rank == 0:
        log.warning(
            "random generators of accelerator %s keep their present states: the checkpoint was saved on %s",
            run.accelerator.name, states.device or "another one",
        )  # fmt: skip
    return states
