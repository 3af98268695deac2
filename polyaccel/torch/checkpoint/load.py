"""A torch engine's state from a checkpoint, which holds what `contents` gives."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.format.imported import IMPORTED
from polyaccel.checkpoint.format.tensors import PARAM
from polyaccel.checkpoint.format.torch_values import unpacked
from polyaccel.checkpoint.load.custom_load import BUFFER, CustomLoadReader
from polyaccel.checkpoint.load.name_map import NameMap, RenamedReader
from polyaccel.core.types import DType
from polyaccel.engine.base_checksum import base_checksums
from polyaccel.engine.groups import require_order
from polyaccel.engine.imported_states import own_scalars, own_schedule_state, state_names
from polyaccel.engine.lr_schedule_base import Schedule
from polyaccel.engine.resume import LoadPlan, SavedValues, check_names, validate_state_dict, wanted_state
from polyaccel.errors import CheckpointError, ConfigError
from polyaccel.torch.api.client_optimizer import ClientOptimizer
from polyaccel.torch.api.whole_states import blobs_of
from polyaccel.torch.checkpoint.contents import CLIENT_SCHEDULE, CLIENT_STATE, TorchRun, tied_names
from polyaccel.torch.checkpoint.custom_loading import CustomLoad, CustomLoading
from polyaccel.torch.checkpoint.loader_states import saved_loader_state
from polyaccel.torch.checkpoint.random_states import RandomStates
from polyaccel.torch.checkpoint.saved_buffers import (
    Reader,
    module_buffers,
    read_buffer,
    saved_buffers,
    saved_extra_states,
    set_extra_states,
)
from polyaccel.torch.engine_loader import EngineLoader
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.plan.policy import ENGINE_STATES
from polyaccel.zero.trained_state import over_stages

log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a load takes over, as `load_checkpoint` was asked. `custom` writes the module's tensors."""

    strict: bool
    optimizer_states: bool
    schedule: bool
    module_only: bool
    name_map: NameMap | None
    custom: CustomLoad | None

    @classmethod
    def chosen(
        cls,
        strict: bool,
        optimizer_states: bool,
        schedule: bool,
        module_only: bool,
        name_map: NameMap | None,
        custom: CustomLoad | None,
    ) -> LoadOptions:
        """The module alone excludes the others."""
        others = not module_only
        return cls(strict, optimizer_states and others, schedule and others, module_only, name_map, custom)

    @property
    def is_whole(self) -> bool:
        """Whether all of this run's own state is taken over."""
        return self.optimizer_states and self.schedule and self.name_map is None and self.custom is None


def load_run(
    run: TorchRun,
    saved: CheckpointReader,
    wanted: LoadOptions,
) -> tuple[str, dict[str, Any]]:
    """Take over `wanted` of a checkpoint on all ranks or none; return path and client state. Collective."""
    run.zero.params.wait_all_gathers()
    base, loading = {}, CustomLoading.prepare(wanted.custom, run.adapter, run.zero)
    if wanted.strict and loading is None and (saved.scalars.get("frozen_base")):
        names = {param.fqn for param in run.zero.layout.params}
        base = base_checksums(run.zero, run.communicator, names - {entry.fqn for entry in saved.tensors()})

    members = run.members()
    buffers = over_stages(run.zero.model_parallel_group, dict.fromkeys(module_buffers(run.adapter), True)).keys()
    elsewhere = {*members, *over_stages(run.zero.model_parallel_group, tied_names(run.adapter))}

    def check() -> LoadPlan:
        return _check(run, saved, base, wanted, loading, members, buffers, elsewhere)

    run.load_together(saved, check)
    return f"{saved.storage.location}/{saved.tag}", client_state_of(saved)


def client_state_of(saved: CheckpointReader) -> dict[str, Any]:
    """The client state of a checkpoint. Raises CheckpointError for one that cannot be read."""
    whole = saved.rank_blobs(0).get(CLIENT_STATE)
    state = saved.scalars["client_state"] if whole is None else unpacked(whole, "client_state")
    return dict(state)


def frozen_with_states(run: TorchRun, saved: CheckpointReader, name_map: NameMap | None) -> frozenset[str]:
    """The members of the optimizer's groups that are laid out as frozen here, and were trained when `saved` was
    written: their states are there. Those of others, which this run cannot train, are logged as left out.

    None for a checkpoint that is refused later, or has another optimizer's states.
    """
    adapter, members = run.adapter, run.members()
    try:
        shapes = {param.fqn: param.global_shape for param in run.zero.layout.params}
        reader = RenamedReader(saved, name_map, shapes, states=state_names(saved, _order(run), wanted=True))
        reader.scalars = own_scalars(run, reader, members, wanted=True)
        values = SavedValues.from_reader(reader)
    except (CheckpointError, ConfigError):
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
    load: LoadOptions,
    loading: CustomLoading | None,
    members: Mapping[str, int | None],
    buffers_of_stages: Collection[str],
    elsewhere: Collection[str],
) -> LoadPlan:
    """Check and verify what this rank will take over from `saved`; see [Note: All-or-nothing load] in `engine.resume`.
    `base` has the checksums of parameters that `saved` may have left out. `members` has the parameters of all stages of
    a pipeline with their optimizer groups, `buffers_of_stages` the names of their buffers, `elsewhere` those of
    parameters, also the second names of tied ones."""
    shapes = {param.fqn: param.global_shape for param in run.zero.layout.params}
    states = state_names(saved, _order(run), wanted=load.optimizer_states)
    renamed = RenamedReader(saved, load.name_map, shapes, buffers=buffers_of_stages, states=states)
    renamed.scalars = own_scalars(run, renamed, members, wanted=load.optimizer_states)
    reader: Reader = renamed
    values = SavedValues.from_reader(reader)
    if loading is None:
        left_out: Collection[str] = _same_base(renamed, values, base) if load.strict else frozenset()
        check_names(run.zero, reader, strict=load.strict, left_out=left_out, elsewhere=elsewhere)
    else:
        given = loading.values(run.adapter, saved, run.accelerator.allocate, renamed.saved_name)
        given.check({param.fqn: param.shape for param in run.zero.layout.params})
        reader, left_out = CustomLoadReader(renamed, given, shapes), given.untouched
    client = run.zero.optimizer if isinstance(run.zero.optimizer, ClientOptimizer) else None
    sources = run.match_groups(reader, values, members, wanted=load.optimizer_states)
    resumes_optimizer = sources is not None
    if resumes_optimizer and client is not None:
        _allocate_client_states(run.zero, reader)
    wanted = wanted_state(
        run.zero,
        reader,
        optimizer_states=load.optimizer_states,
        strict=load.strict,
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
    random_states = of_loader = None
    if not load.module_only:
        run.check_progress(values)
        random_states = _saved_random_states(run, reader)
        ranks = run.communicator
        of_loader = saved_loader_state(run.data, saved, values.data, ranks.rank, ranks.world_size)
        if of_loader is not None and isinstance(run.data, EngineLoader):
            validate_state_dict(run.data, of_loader)
    of_optimizer = blobs_of(saved.owned_blobs()) if resumes_optimizer else []
    if client is not None and of_optimizer:
        client.check_whole_state(of_optimizer)
    resumes_schedule = load.schedule and run.schedule is not None
    of_schedule = _saved_schedule(run.schedule, values, blobs) if resumes_schedule else None
    if resumes_schedule and IMPORTED in saved.scalars:
        of_schedule = values.lr_scheduler or _saved_schedule(None, values, blobs)
        if of_schedule is not None:
            of_schedule = own_schedule_state(reader.tag, of_schedule, run.schedule.state_dict())
    if of_schedule is not None:
        validate_state_dict(run.schedule, of_schedule)
        if sources is not None:
            require_order(of_schedule, sources, reader.tag)
    wanted.verify(reader)

    def read() -> None:
        wanted.read(reader, run.accelerator)
        for name, tensor in buffers.items():
            read_buffer(run.accelerator, reader, name, tensor)
        set_extra_states(run.adapter.module, extra_states)
        if not load.module_only:
            run.load_progress(values)
            if of_loader is not None:
                run.data.load_state_dict(of_loader)
        if random_states is not None:
            random_states.restore(run.accelerator)
        if sources is not None:
            wanted.begin_fresh(run)
            run.load_groups(values, sources)
            if client is not None:
                client.restore(run.zero.shards, values.client_optimizer, reader.has)
                if of_optimizer:
                    client.load_whole_state(of_optimizer)
        if of_schedule is not None:
            run.schedule.load_state_dict(of_schedule)

    return LoadPlan(
        read=read,
        is_whole=load.optimizer_states and not wanted.kept,
        steps={fqn: reader.steps_of(fqn) for fqn in run.zero.steps if reader.has(fqn, PARAM)}
        if resumes_optimizer
        else {},
    )


def _same_base(reader: RenamedReader, values: SavedValues, base: Mapping[str, str]) -> frozenset[str]:
    """Return left-out parameters with equal bits here. Raises CheckpointError for others."""
    left_out = {fqn: saved for fqn in base if (saved := values.frozen_base.get(reader.saved_name(fqn)))}
    others = {fqn: (saved, base[fqn]) for fqn, saved in left_out.items() if saved != base[fqn]}
    if others:
        named = ", ".join(f"{fqn} ({saved}, here {ours})" for fqn, (saved, ours) in list(others.items())[:8])
        raise CheckpointError(
            f"checkpoint {reader.tag!r} left out {len(others)} frozen parameters that this model has with other values "
            f"(type and checksum): {named}",
            hint="begin with the weights that the saved run began with; load_module_strict=False continues with these",
            value=sorted(others),
        )
    return frozenset(left_out)


def _allocate_client_states(zero: ZeroEngine, reader: Reader) -> None:
    saved: dict[str, list[tuple[str, DType]]] = {}
    for entry in reader.tensors():
        if entry.kind not in (PARAM, BUFFER, *ENGINE_STATES):
            saved.setdefault(entry.fqn, []).append((entry.kind, entry.dtype))
    for shard in zero.shards:
        for piece in shard.slices:
            for kind, dtype in saved.get(piece.fqn, ()):
                if kind not in shard.states:
                    shard.allocate_state(kind, dtype)


def _order(run: TorchRun) -> list[list[str]] | None:
    """The parameters of the optimizer's groups in the order of the script; None where other stages have some."""
    names = run.adapter.names
    if run.groups is None or run.zero.model_parallel_group is not None:
        return None
    return [[names[param] for param in group["params"] if param in names] for group in run.groups]


def _saved_schedule(schedule: Any, values: SavedValues, blobs: Mapping[str, bytes]) -> Mapping[str, Any] | None:
    """Return `schedule`'s saved state, or that of a foreign one; None without one."""
    if isinstance(schedule, Schedule):
        return values.lr_scheduler
    if CLIENT_SCHEDULE not in blobs:
        return None
    state = unpacked(blobs[CLIENT_SCHEDULE], "the state of the learning-rate schedule")
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise CheckpointError(f"the saved state of the learning-rate schedule is a {kind}", hint="load another tag")
    return state


def _saved_random_states(run: TorchRun, reader: Reader) -> RandomStates | None:
    """The states that this rank's generators continue from; None where they keep their own."""
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
