"""A torch engine's state to and from a checkpoint: slices from the step, buffers from the module, the rest as plain
values."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator, Mapping
from logging import getLogger
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from polyaccel.accelerators.torch_memory import dtype_of
from polyaccel.checkpoint import TensorPiece, open_checkpoint, save_checkpoint
from polyaccel.checkpoint.name_map import NameMap, RenamedReader
from polyaccel.engine.lr_schedules import Schedule
from polyaccel.engine.resuming import PARAM, check_names, check_optimizer, load_groups, read_state
from polyaccel.errors import CheckpointError
from polyaccel.torch.client_optimizer import ClientOptimizer
from polyaccel.types import DType
from polyaccel.zero.optimizers import SliceOptimizer

if TYPE_CHECKING:
    from polyaccel.torch.engine import TorchEngine

log = getLogger(__name__)

_BUFFER = "buffer"
_CLIENT_OPTIMIZER, _CLIENT_SCHEDULE = "client_optimizer", "client_schedule"


def save_engine(
    engine: TorchEngine,
    save_dir: str,
    tag: str,
    client_state: Mapping[str, Any],
    save_latest: bool,
    exclude_frozen: bool,
) -> None:
    """Write the whole state of `engine`. Collective. Raises PolyaccelError after half an update."""
    engine.zero.require_whole()
    engine.zero.params.fence()
    optimizer = engine.zero.optimizer
    blobs = _random_states(engine)
    client_scalars: dict[str, Any] = {}
    if isinstance(optimizer, ClientOptimizer):
        for part in engine.communicator.all_gather_object(optimizer.scalar_states()):
            client_scalars.update(part)
        whole = optimizer.whole_state()
        if whole is not None:
            blobs[_CLIENT_OPTIMIZER] = whole
    schedule, loader = engine.lr_scheduler, engine.training_dataloader
    if schedule is not None and not isinstance(schedule, Schedule):
        blobs[_CLIENT_SCHEDULE] = _packed(schedule.state_dict())
    scalars = {
        "counters": engine.counters.state_dict(),
        "loss_scaler": engine.loss_scaler.state_dict(),
        "optimizer": engine.optimizer.state_dict() if engine.optimizer is not None else None,
        "optimizer_kind": _optimizer_kind(optimizer),
        "param_steps": engine.zero.steps,
        "client_optimizer": client_scalars,
        "lr_scheduler": schedule.state_dict() if isinstance(schedule, Schedule) else None,
        "data": loader.state_dict() if loader is not None else None,
        "client_state": dict(client_state),
    }
    save_checkpoint(
        save_dir,
        tag,
        communicator=engine.communicator,
        pieces=list(_pieces(engine, exclude_frozen)),
        scalars=scalars,
        rank_blobs=blobs,
        tag_validation=engine.config.checkpoint.tag_validation,
        save_latest=save_latest,
    )


def load_engine(
    engine: TorchEngine,
    load_dir: str,
    tag: str | None,
    *,
    strict: bool,
    optimizer_states: bool,
    schedule: bool,
    module_only: bool,
    name_map: NameMap | None,
) -> tuple[str, dict[str, Any]]:
    """Take over a checkpoint's state. Collective. Returns its path and the client state."""
    engine.zero.params.fence()
    saved = open_checkpoint(load_dir, tag, communicator=engine.communicator)
    reader = RenamedReader(saved, name_map, {param.fqn: param.shape for param in engine.zero.layout.params})
    scalars = reader.scalars
    check_names(engine.zero, reader, strict=strict)
    optimizer = engine.zero.optimizer
    if optimizer_states:
        check_optimizer(_optimizer_kind(optimizer), reader)
    if optimizer_states and isinstance(optimizer, ClientOptimizer):
        _allocate_client_states(engine, reader)
    resumes_optimizer = optimizer_states and engine.optimizer is not None and scalars["optimizer"] is not None
    read_state(
        engine.zero,
        engine.accelerator,
        reader,
        optimizer_states=optimizer_states,
        counts_updates=resumes_optimizer,
        may_lack_states=isinstance(optimizer, ClientOptimizer),
    )
    _load_buffers(engine, reader)
    if not module_only:
        engine.counters.load_state_dict(scalars["counters"])
        engine.loss_scaler.load_state_dict(scalars["loss_scaler"])
        if engine.training_dataloader is not None and scalars["data"] is not None:
            engine.training_dataloader.load_state_dict(scalars["data"])
        _restore_random_states(engine, reader)
    if resumes_optimizer:
        load_groups(engine.optimizer.param_groups, scalars["optimizer"]["param_groups"])
        if isinstance(optimizer, ClientOptimizer):
            optimizer.restore(engine.zero.shards, scalars["client_optimizer"], reader.has)
            if _CLIENT_OPTIMIZER in (blobs := reader.rank_blobs(0)):
                optimizer.load_whole_state(blobs[_CLIENT_OPTIMIZER])
    if schedule and engine.lr_scheduler is not None:
        _load_schedule(engine.lr_scheduler, reader)
    return f"{load_dir}/{reader.tag}", scalars["client_state"]


def _pieces(engine: TorchEngine, exclude_frozen: bool) -> Iterator[TensorPiece]:
    optimizer = engine.zero.optimizer
    shards = {slot.param.fqn: shard for shard in engine.zero.shards for slot in shard.bucket.slots}
    for slot, kind, start, buffer in engine.zero.owned_pieces():
        fqn = slot.param.fqn
        # A shard's buffer of a state has room for parameters that have no such state.
        exists = kind == PARAM or not isinstance(optimizer, ClientOptimizer) or optimizer.holds(shards[fqn], fqn, kind)
        if exists and (slot.param.trainable or not exclude_frozen):
            yield TensorPiece(slot.param.fqn, kind, slot.param.shape, buffer.dtype, start, buffer)
    if engine.communicator.rank == 0:
        for name, tensor in _buffers(engine).items():
            flat = engine.accelerator.wrap(tensor.detach().contiguous())
            yield TensorPiece(name, _BUFFER, tuple(tensor.shape), dtype_of(tensor.dtype), 0, flat)


def _buffers(engine: TorchEngine) -> dict[str, Tensor]:
    """The module's persistent buffers by name."""
    parameters = set(map(id, engine.adapter.names))
    found = {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if id(value) in parameters:
            continue
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            cure = "keep such state in client_state, or in tensors registered as buffers"
            raise CheckpointError(f"the module's extra state {name!r} is a {kind}", cure=cure, value=kind)
        found[name] = value
    return found


def _load_buffers(engine: TorchEngine, reader: RenamedReader) -> None:
    for name, tensor in _buffers(engine).items():
        if not reader.has(name, _BUFFER):
            log.warning("the checkpoint has no buffer %r; it keeps its value", name)
            continue
        flat = engine.accelerator.allocate(tensor.numel(), dtype_of(tensor.dtype))
        reader.read_into(name, _BUFFER, 0, flat.numel, flat, cast_through=engine.accelerator.allocate)
        with torch.no_grad():
            tensor.copy_(flat.raw.view(tensor.shape))


def _optimizer_kind(optimizer: SliceOptimizer | None) -> str | None:
    if optimizer is None:
        return None
    return optimizer.kind if isinstance(optimizer, ClientOptimizer) else type(optimizer).__name__


def _allocate_client_states(engine: TorchEngine, reader: RenamedReader) -> None:
    saved: dict[str, list[tuple[str, DType]]] = {}
    for entry in reader.tensors():
        if entry.kind not in (PARAM, _BUFFER):
            saved.setdefault(entry.fqn, []).append((entry.kind, entry.dtype))
    for shard in engine.zero.shards:
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


def _random_states(engine: TorchEngine) -> dict[str, bytes]:
    """The states of every generator that a training script draws from, on this rank."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "rng.accelerator": engine.accelerator.rng_state(),
        "rng.torch": torch.get_rng_state().numpy().tobytes(),
        "rng.python": json.dumps(random.getstate()).encode(),
        "rng.numpy": json.dumps([kind, np.asarray(keys).tolist(), position, has_gauss, gauss]).encode(),
    }


def _restore_random_states(engine: TorchEngine, reader: RenamedReader) -> None:
    if reader.world_size != engine.communicator.world_size:
        log.warning(
            "random generators keep their present states: they were saved on %d ranks, this is a run of %d",
            reader.world_size, engine.communicator.world_size,
        )  # fmt: skip
        return
    blobs = reader.rank_blobs(engine.communicator.rank)
    if "rng.torch" not in blobs:
        log.warning("random generators keep their present states: another framework saved the checkpoint")
        return
    engine.accelerator.set_rng_state(blobs["rng.accelerator"])
    torch.set_rng_state(torch.frombuffer(bytearray(blobs["rng.torch"]), dtype=torch.uint8))
    version, internal, gauss = json.loads(blobs["rng.python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = json.loads(blobs["rng.numpy"])
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
