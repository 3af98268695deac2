"""What a torch engine saves: slices from the step, buffers from the module, the rest as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polyaccel.accelerators.memory.torch import dtype_of
from polyaccel.checkpoint import TensorPiece
from polyaccel.checkpoint.format.tensors import PARAM
from polyaccel.checkpoint.format.torch_values import packed
from polyaccel.checkpoint.load.custom_load import BUFFER
from polyaccel.checkpoint.save.protocol import SaveContents
from polyaccel.core.tagged_json import is_serializable
from polyaccel.core.types import ParamSpec
from polyaccel.engine.base_checksum import base_checksums
from polyaccel.engine.lr_schedule_base import Schedule
from polyaccel.engine.resume import TrainingRun
from polyaccel.errors import CheckpointError
from polyaccel.torch.api.client_optimizer import ClientOptimizer
from polyaccel.torch.api.whole_states import blob_name
from polyaccel.torch.checkpoint.loader_states import loader_state
from polyaccel.torch.checkpoint.random_states import RandomStates
from polyaccel.torch.checkpoint.saved_buffers import extra_state_blobs, merged_blobs, module_buffers
from polyaccel.torch.sharding.buffers import plain_values
from polyaccel.torch.sharding.module_adapter import TorchAdapter
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.plan.policy import ENGINE_STATES
from polyaccel.zero.trained_state import over_stages

CLIENT_SCHEDULE, CLIENT_STATE = "client_schedule", "client_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRun(TrainingRun):
    """The parts of a torch engine whose state a checkpoint holds."""

    zero: ZeroEngine
    adapter: TorchAdapter
    data: Any
    """The loader of training data; None without one."""


def tied_names(adapter: TorchAdapter) -> dict[str, str]:
    """The other names of tied parameters, each with the name that the parameter is saved under."""
    named = adapter.module.named_parameters(remove_duplicate=False)
    return {name: fqn for name, param in named if (fqn := adapter.names.get(param, name)) != name}


def contents_of(
    run: TorchRun, client_state: Mapping[str, Any], *, allows_bytes: bool, exclude_frozen: bool = False
) -> SaveContents:
    """Return what this rank saves of `run`. Collective. Raises after half an update."""
    run.zero.consistency.require()
    run.zero.params.wait_all_gathers()
    optimizer = run.zero.optimizer
    blobs = RandomStates.now(run.accelerator).to_blobs()
    scalars = run.scalars(client_state, may_have_bytes=allows_bytes)
    scalars["param_steps"] = over_stages(run.zero.model_parallel_group, run.zero.steps)
    if ties := over_stages(run.zero.model_parallel_group, tied_names(run.adapter)):
        scalars["tied_weights"] = ties
    if exclude_frozen:
        frozen = {param.fqn for param in run.zero.layout.params if _is_left_out(param)}
        scalars["frozen_base"] = base_checksums(run.zero, run.communicator, frozen)
    if not is_serializable(scalars["client_state"]):
        blobs[CLIENT_STATE] = packed(scalars.pop("client_state"), "client_state")
        scalars["client_state"] = {
            name: value for name, value in client_state.items() if is_serializable({name: value})
        }
    if isinstance(optimizer, ClientOptimizer):
        kinds = optimizer.states_by_kind()
        for numbers, others in run.communicator.all_gather_object((kinds.numbers, kinds.others)):
            if others:
                fqn, name = others[0]
                raise CheckpointError(
                    f"the optimizer keeps a state {name!r} of parameter {fqn!r} that is neither a number nor has a "
                    "value for each element, and checkpoints of an optimizer that runs on slices have no place for it",
                    hint='keep it outside of optimizer.state and save it by client_state, or use "stage": 0',
                    value=name,
                )
            scalars["client_optimizer"].update(numbers)
        if optimizer.saves_whole_states(run.zero.communicator.rank):
            whole = optimizer.whole_state()
            if whole is not None:
                blobs[blob_name(run.communicator.rank)] = whole
    if isinstance(run.schedule, Schedule):
        scalars["lr_scheduler"] = run.schedule.state_dict()
    elif run.schedule is not None:
        blobs[CLIENT_SCHEDULE] = packed(run.schedule.state_dict(), "the state of the learning-rate schedule")
    scalars["data"], of_loader = loader_state(run.data, run.communicator.world_size)
    blobs |= of_loader
    extra, beyond = extra_state_blobs(run.adapter.module), run.zero.model_parallel_group
    blobs |= extra if beyond is None else merged_blobs(beyond.all_gather_object(extra))
    return SaveContents(
        pieces=lambda: _pieces(run, exclude_frozen),
        scalars=scalars,
        rank_blobs=blobs,
        frozen=frozenset(param.fqn for param in run.zero.layout.params if not param.trainable),
    )


def _pieces(run: TorchRun, exclude_frozen: bool) -> Iterator[TensorPiece]:
    optimizer = run.zero.optimizer
    shards = {slot.param.fqn: shard for shard in run.zero.shards for slot in shard.bucket.slots}
    for slot, kind, start, buffer in run.zero.local_shards():
        fqn = slot.param.fqn
        # A shard's buffer of a state has room for parameters without that state.
        exists = (
            kind == PARAM
            or kind in ENGINE_STATES
            or not isinstance(optimizer, ClientOptimizer)
            or optimizer.holds(shards[fqn], fqn, kind)
        )
        if exists and not (exclude_frozen and _is_left_out(slot.param)):
            param = slot.param
            yield TensorPiece(fqn, kind, param.global_shape, buffer.dtype, start, buffer, param.block)
    if run.zero.communicator.rank == 0:  # of each stage
        for name, tensor in module_buffers(run.adapter).items():
            values = plain_values(tensor)
            yield TensorPiece(
                name, BUFFER, tuple(values.shape), dtype_of(values.dtype), 0, run.accelerator.wrap(values)
            )


def _is_left_out(param: ParamSpec) -> bool:
    """Whether `exclude_frozen` leaves a parameter out."""
    return not param.trainable and param.block is None
