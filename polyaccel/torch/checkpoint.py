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
from polyaccel.checkpoint import CheckpointReader, TensorPiece, open_checkpoint, save_checkpoint
from polyaccel.engine.lr_schedules import Schedule
from polyaccel.errors import CheckpointError
from polyaccel.torch.client_optimizer import ClientOptimizer
from polyaccel.torch.optimizer import load_groups
from polyaccel.types import DType
from polyaccel.zero.optimizers import SliceOptimizer

if TYPE_CHECKING:
    from polyaccel.torch.engine import TorchEngine

log = getLogger(__name__)

_PARAM, _BUFFER = "param", "buffer"
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
) -> tuple[str, dict[str, Any]]:
    """Take over a checkpoint's state. Collective. Returns its path and the client state."""
    engine.zero.params.fence()
    reader = open_checkpoint(load_dir, tag, communicator=engine.communicator)
    scalars = reader.scalars
    _check_names(engine, reader, strict)
    optimizer = engine.zero.optimizer
    if optimizer_states:
        _check_optimizer(optimizer, reader)
    if optimizer_states and isinstance(optimizer, ClientOptimizer):
        _allocate_client_states(engine, reader)
    is_whole = optimizer_states
    for slot, kind, start, buffer in engine.zero.needed_pieces():
        fqn = slot.param.fqn
        may_lack = kind == _PARAM or isinstance(optimizer, ClientOptimizer)
        if (kind == _PARAM or optimizer_states) and (reader.has(fqn, kind) or not may_lack):
            reader.read_into(fqn, kind, start, buffer.numel, buffer, cast_through=engine.accelerator.allocate)
        elif kind == _PARAM:
            is_whole = False
    engine.zero.discard_gradients()
    if is_whole:
        engine.zero.mend()
    resumes_optimizer = optimizer_states and engine.optimizer is not None and scalars["optimizer"] is not None
    if resumes_optimizer:  # before master weights are rounded, which depends on it
        engine.zero.steps.update({fqn: scalars["param_steps"].get(fqn, 0) for fqn in engine.zero.steps})
    engine.zero.params.publish_masters()
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
        exists = kind == _PARAM or not isinstance(optimizer, ClientOptimizer) or optimizer.holds(shards[fqn], fqn, kind)
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


def _load_buffers(engine: TorchEngine, reader: CheckpointReader) -> None:
    for name, tensor in _buffers(engine).items():
        if not reader.has(name, _BUFFER):
            log.warning("the checkpoint has no buffer %r; it keeps its value", name)
            continue
        flat = engine.accelerator.allocate(tensor.numel(), dtype_of(tensor.dtype))
        reader.read_into(name, _BUFFER, 0, flat.numel, flat, cast_through=engine.accelerator.allocate)
        with torch.no_grad():
            tensor.copy_(flat.raw.view(tensor.shape))


def _check_names(engine: TorchEngine, reader: CheckpointReader, strict: bool) -> None:
    """Compare the model's parameters with the checkpoint's. Raises CheckpointError naming what differs."""
    ours = {param.fqn: param.shape for param in engine.zero.layout.params if param.numel}
    theirs = {entry.fqn: tuple(entry.shape) for entry in reader.tensors() if entry.kind == _PARAM}
    shapes = {fqn: (theirs[fqn], ours[fqn]) for fqn in ours.keys() & theirs.keys() if theirs[fqn] != ours[fqn]}
    missing, unknown = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    if shapes or (strict and (missing or unknown)):
        differences = {"other shape (saved, model)": shapes, "not saved": missing[:8], "not in the model": unknown[:8]}
        told = "; ".join(f"{what}: {which}" for what, which in differences.items() if which)
        raise CheckpointError(
            f"checkpoint {reader.tag!r} is of another model: {told}",
            cure="build the model that was saved; load_module_strict=False takes what fits by name",
            value=reader.tag,
        )


def _optimizer_kind(optimizer: SliceOptimizer | None) -> str | None:
    if optimizer is None:
        return None
    return optimizer.kind if isinstance(optimizer, ClientOptimizer) else type(optimizer).__name__


def _check_optimizer(optimizer: SliceOptimizer | None, reader: CheckpointReader) -> None:
    """Raise CheckpointError when the saved optimizer states are of another kind than this run's."""
    ours, theirs = _optimizer_kind(optimizer), reader.scalars["optimizer_kind"]
    if ours is not None and theirs is not None and ours != theirs:
        raise CheckpointError(
            f"checkpoint {reader.tag!r} has the optimizer state of {theirs}, this run has {ours}",
            cure="build the optimizer that was saved; load_optimizer_states=False begins with a new one",
            value=theirs,
        )


def _allocate_client_states(engine: TorchEngine, reader: CheckpointReader) -> None:
    saved: dict[str, list[tuple[str, DType]]] = {}
    for entry in reader.tensors():
        if entry.kind not in (_PARAM, _BUFFER):
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


def _load_schedule(schedule: Any, reader: CheckpointReader) -> None:
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


def _restore_random_states(engine: TorchEngine, reader: CheckpointReader) -> None:
    if reader.world_size != engine.communicator.world_size:
        log.warning(
            "random generators keep their present states: they were saved on %d ranks, this is a run of %d",
            reader.world_size, engine.communicator.world_size,
        )  # fmt: skip
        return
    blobs = reader.rank_blobs(engine.communicator.rank)
    engine.accelerator.set_rng_state(blobs["rng.accelerator"])
    torch.set_rng_state(torch.frombuffer(bytearray(blobs["rng.torch"]), dtype=torch.uint8))
    version, internal, gauss = json.loads(blobs["rng.python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = json.loads(blobs["rng.numpy"])
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
