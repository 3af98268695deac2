"""A JAX engine's state to and from a checkpoint, in the form that torch engines write: either goes on from the other's.

The function's random keys follow from the seed and the count of micro-batches, so no generator is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyaccel.checkpoint import TensorPiece, open_checkpoint, save_checkpoint
from polyaccel.checkpoint.name_map import NameMap, RenamedReader
from polyaccel.engine.resuming import check_names, check_optimizer, hyperparameters, load_groups, read_state
from polyaccel.jax.optax_optimizer import OptaxOptimizer

if TYPE_CHECKING:
    from polyaccel.jax.engine import JaxEngine

_OPTAX = "optax"


def save_engine(engine: JaxEngine, save_dir: str, tag: str, client_state: Mapping[str, Any], save_latest: bool) -> None:
    """Write the whole state of `engine`. Collective. Raises PolyaccelError after half an update."""
    engine.zero.require_whole()
    engine.zero.params.fence()
    schedule, optimizer, stacking = engine.lr_scheduler, engine.zero.optimizer, engine.adapter.stacking
    groups = [hyperparameters(group) for group in engine.optimizer.param_groups]
    scalars = {
        "counters": engine.counters.state_dict(),
        "loss_scaler": engine.loss_scaler.state_dict(),
        "optimizer": {"param_groups": groups} if engine.optimizer_kind is not None else None,
        "optimizer_kind": engine.optimizer_kind,
        "param_steps": {stacking.in_whole(name, (), 0)[0]: count for name, count in engine.zero.steps.items()},
        "client_optimizer": {_OPTAX: dict(optimizer.numbers)} if isinstance(optimizer, OptaxOptimizer) else {},
        "lr_scheduler": schedule.state_dict() if schedule is not None else None,
        "data": None,
        "client_state": dict(client_state),
    }
    save_checkpoint(
        save_dir,
        tag,
        communicator=engine.communicator,
        pieces=[
            TensorPiece(fqn, kind, shape, buffer.dtype, at, buffer)
            for slot, kind, start, buffer in engine.zero.owned_pieces()
            for fqn, shape, at in [stacking.in_whole(slot.param.fqn, slot.param.shape, start)]
        ],
        scalars=scalars,
        rank_blobs={},
        tag_validation=engine.config.checkpoint.tag_validation,
        save_latest=save_latest,
    )


def load_engine(
    engine: JaxEngine,
    load_dir: str,
    tag: str | None,
    *,
    optimizer_states: bool,
    schedule: bool,
    name_map: NameMap | None,
) -> tuple[str, dict[str, Any]]:
    """Take over a checkpoint's state. Collective. Returns its path and the client state."""
    engine.zero.params.fence()
    saved = open_checkpoint(load_dir, tag, communicator=engine.communicator)
    stacking = engine.adapter.stacking
    shapes = dict(stacking.in_whole(param.fqn, param.shape, 0)[:2] for param in engine.zero.layout.params)
    reader = RenamedReader(saved, name_map, shapes, stacking.layers)
    scalars = reader.scalars
    check_names(engine.zero, reader, strict=True)
    if optimizer_states:
        check_optimizer(engine.optimizer_kind, reader)
    resumes = optimizer_states and engine.optimizer_kind is not None and scalars["optimizer"] is not None
    read_state(engine.zero, engine.accelerator, reader, optimizer_states=optimizer_states, counts_updates=resumes)
    engine.counters.load_state_dict(scalars["counters"])
    engine.loss_scaler.load_state_dict(scalars["loss_scaler"])
    if resumes:
        load_groups(engine.optimizer.param_groups, scalars["optimizer"]["param_groups"])
        if isinstance(engine.zero.optimizer, OptaxOptimizer):
            engine.zero.optimizer.numbers.update(scalars["client_optimizer"][_OPTAX])
    if schedule and engine.lr_scheduler is not None and scalars["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(scalars["lr_scheduler"])
    return f"{load_dir}/{reader.tag}", scalars["client_state"]
