"""A torch engine's state to and from a checkpoint: slices from the step, buffers from the module, the rest as plain
values."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.memory.torch import dtype_of
from polyaccel.checkpoint import Storage, TensorPiece, open_checkpoint, save_checkpoint
from polyaccel.checkpoint.name_map import NameMap, RenamedReader
from polyaccel.checkpoint.writer import TagValidation
from polyaccel.engine.lr_schedules import Schedule
from polyaccel.engine.resuming import PARAM, TrainingRun, check_names, read_state
from polyaccel.errors import CheckpointError
from polyaccel.torch.adapter import TorchAdapter
from polyaccel.torch.api.client_optimizer import ClientOptimizer
from polyaccel.torch.api.data import ShardedDataLoader
from polyaccel.types import DType
from polyaccel.zero.step import ZeroStep
from polyaccel.zero.update.optimizers import SliceOptimizer

log = getLogger(__name__)

_BUFFER = "buffer"
_CLIENT_OPTIMIZER, _CLIENT_SCHEDULE = "client_optimizer", "client_schedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRun(TrainingRun):
    """The parts of a torch engine whose state a checkpoint holds."""

    zero: ZeroStep
    adapter: TorchAdapter
    data: ShardedDataLoader[Any] | None
    """The engine's own loader of training data."""


def save_run(
    run: TorchRun,
    storage: Storage,
    tag: str,
    *,
    client_state: Mapping[str, Any],
    exclude_frozen: bool,
    save_latest: bool,
    tag_validation: TagValidation,
) -> None:
    """Write the whole state of `run`. Collective. Raises PolyaccelError after half an update."""
    run.zero.require_whole()
    run.zero.params.fence()
    optimizer = run.zero.optimizer
    blobs = _random_states(run.accelerator)
    scalars = run.scalars(client_state)
    if isinstance(optimizer, ClientOptimizer):
        for part in run.communicator.all_gather_object(optimizer.scalar_states()):
            scalars["client_optimizer"].update(part)
        whole = optimizer.whole_state()
        if whole is not None:
            blobs[_CLIENT_OPTIMIZER] = whole
    if isinstance(run.schedule, Schedule):
        scalars["lr_scheduler"] = run.schedule.state_dict()
    elif run.schedule is not None:
        blobs[_CLIENT_SCHEDULE] = _packed(run.schedule.state_dict())
    if run.data is not None:
        scalars["data"] = run.data.state_dict()
    save_checkpoint(
        storage,
        tag,
        communicator=run.communicator,
        pieces=list(_pieces(run, exclude_frozen)),
        scalars=scalars,
        rank_blobs=blobs,
        tag_validation=tag_validation,
        save_latest=save_latest,
    )


def load_run(
    run: TorchRun,
    storage: Storage,
    tag: str | None,
    *,
    strict: bool,
    optimizer_states: bool,
    schedule: bool,
    module_only: bool,
    name_map: NameMap | None,
) -> tuple[str, dict[str, Any]]:
    """Take over a checkpoint's state. Collective. Returns its path and the client state."""
    run.zero.params.fence()
    saved = open_checkpoint(storage, tag, communicator=run.communicator)
    reader = RenamedReader(saved, name_map, {param.fqn: param.shape for param in run.zero.layout.params})
    check_names(run.zero, reader, strict=strict)
    optimizer = run.zero.optimizer
    resumes_optimizer = run.resumes_optimizer(reader, wanted=optimizer_states)
    if optimizer_states and isinstance(optimizer, ClientOptimizer):
        _allocate_client_states(run.zero, reader)
    read_state(
        run.zero,
        run.accelerator,
        reader,
        optimizer_states=optimizer_states,
        counts_updates=resumes_optimizer,
        may_lack_states=isinstance(optimizer, ClientOptimizer),
    )
    _load_buffers(run, reader)
    if not module_only:
        run.load_progress(reader)
        if run.data is not None and reader.scalars["data"] is not None:
            run.data.load_state_dict(reader.scalars["data"])
        _restore_random_states(run, reader)
    if resumes_optimizer:
        run.load_groups(reader)
        if isinstance(optimizer, ClientOptimizer):
            optimizer.restore(run.zero.shards, reader.scalars["client_optimizer"], reader.has)
            if _CLIENT_OPTIMIZER in (blobs := reader.rank_blobs(0)):
                optimizer.load_whole_state(blobs[_CLIENT_OPTIMIZER])
    if schedule and run.schedule is not None:
        _load_schedule(run.schedule, reader)
    return f"{storage.location}/{reader.tag}", reader.scalars["client_state"]


def _pieces(run: TorchRun, exclude_frozen: bool) -> Iterator[TensorPiece]:
    optimizer = run.zero.optimizer
    shards = {slot.param.fqn: shard for shard in run.zero.shards for slot in shard.bucket.slots}
    for slot, kind, start, buffer in run.zero.owned_pieces():
        fqn = slot.param.fqn
        # A shard's buffer of a state has room for parameters that have no such state.
        exists = kind == PARAM or not isinstance(optimizer, ClientOptimizer) or optimizer.holds(shards[fqn], fqn, kind)
        if exists and (slot.param.trainable or not exclude_frozen):
            yield TensorPiece(slot.param.fqn, kind, slot.param.shape, buffer.dtype, start, buffer)
    if run.communicator.rank == 0:
        for name, tensor in _buffers(run.adapter).items():
            flat = run.accelerator.wrap(tensor.detach().contiguous())
            yield TensorPiece(name, _BUFFER, tuple(tensor.shape), dtype_of(tensor.dtype), 0, flat)


def _buffers(adapter: TorchAdapter) -> dict[str, Tensor]:
    """The module's persistent buffers by name. Every parameter is up to date."""
    parameters = set(map(id, adapter.names))
    found = {}
    for name, value in adapter.module.state_dict(keep_vars=True).items():
        if id(value) in parameters:
            continue
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            cure = "keep such state in client_state, or in tensors registered as buffers"
            raise CheckpointError(f"the module's extra state {name!r} is a {kind}", cure=cure, value=kind)
        found[name] = value
    return found


def _load_buffers(run: TorchRun, reader: RenamedReader) -> None:
    for name, tensor in _buffers(run.adapter).items():
        if not reader.has(name, _BUFFER):
            log.warning("the checkpoint has no buffer %r; it keeps its value", name)
            continue
        flat = run.accelerator.allocate(tensor.numel(), dtype_of(tensor.dtype))
        reader.read_into(name, _BUFFER, 0, flat.numel, flat, cast_through=run.accelerator.allocate)
        with torch.no_grad():
            tensor.copy_(flat.raw.view(tensor.shape))


def optimizer_kind(optimizer: SliceOptimizer | None) -> str | None:
    """The kind of optimizer whose states those of `optimizer` are; None without one."""
    return None if optimizer is None else optimizer.kind


def _allocate_client_states(zero: ZeroStep, reader: RenamedReader) -> None:
    saved: dict[str, list[tuple[str, DType]]] = {}
    for entry in reader.tensors():
        if entry.kind not in (PARAM, _BUFFER):
            saved.setdefault(entry.fqn, []).append((entry.kind, entry.dtype))
    for shard in zero.shards:
        for piece in shard.slices:
            for kind, dtype in saved.get(piece.fqn, ()):
                if kind not in shard.states:
                    shard.allocate_state(kind, dtype)


def _packed(state: Any) -> bytes:
    """The state of a schedule of torch, which may hold more than plain values."""
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def _load_schedule(schedule: Any, reader: RenamedReader) -> None:
    if isinstance(schedule, Schedule):
        if reader.scalars["lr_scheduler"] is not None:
            schedule.load_state_dict(reader.scalars["lr_scheduler"])
    elif _CLIENT_SCHEDULE in (blobs := reader.rank_blobs(0)):
        schedule.load_state_dict(torch.load(io.BytesIO(blobs[_CLIENT_SCHEDULE]), weights_only=True))


def _random_states(accelerator: Accelerator) -> dict[str, bytes]:
    """The states of every generator that a training script draws from, on this rank."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "rng.accelerator": accelerator.rng_state(),
        "rng.torch": torch.get_rng_state().numpy().tobytes(),
        "rng.python": json.dumps(random.getstate()).encode(),
        "rng.numpy": json.dumps([kind, np.asarray(keys).tolist(), position, has_gauss, gauss]).encode(),
    }


def _restore_random_states(run: TorchRun, reader: RenamedReader) -> None:
    if reader.world_size != run.communicator.world_size:
        log.warning(
            "random generators keep their present states: they were saved on %d ranks, this is a run of %d",
            reader.world_size, run.communicator.world_size,
        )  # fmt: skip
        return
    blobs = reader.rank_blobs(run.communicator.rank)
    if "rng.torch" not in blobs:
        log.warning("random generators keep their present states: another framework saved the checkpoint")
        return
    run.accelerator.set_rng_state(blobs["rng.accelerator"])
    torch.set_rng_state(torch.frombuffer(bytearray(blobs["rng.torch"]), dtype=torch.uint8))
    version, internal, gauss = json.loads(blobs["rng.python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = json.loads(blobs["rng.numpy"])
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
