"""A JAX engine's state to and from a checkpoint, in the form that torch engines write: either goes on from the other's.

The function's random keys follow from the seed and the count of micro-batches, so no generator is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyaccel.checkpoint import Storage, TensorPiece, open_checkpoint, save_checkpoint
from polyaccel.checkpoint.name_map import NameMap, RenamedReader
from polyaccel.checkpoint.writer import TagValidation
from polyaccel.engine.resuming import TrainingRun, check_names, read_state
from polyaccel.jax.optax_optimizer import OptaxOptimizer
from polyaccel.jax.program.stacking import Stacking

_OPTAX = "optax"


def save_run(
    run: TrainingRun,
    stacking: Stacking,
    storage: Storage,
    tag: str,
    *,
    client_state: Mapping[str, Any],
    save_latest: bool,
    tag_validation: TagValidation,
) -> None:
    """Write the whole state of `run`, whose layers are cut as `stacking` says. Collective. Raises PolyaccelError after
    half an update."""
    run.zero.require_whole()
    run.zero.params.fence()
    scalars = run.scalars(client_state)
    scalars["param_steps"] = {stacking.in_whole(name, (), 0)[0]: count for name, count in run.zero.steps.items()}
    if isinstance(run.zero.optimizer, OptaxOptimizer):
        scalars["client_optimizer"] = {_OPTAX: dict(run.zero.optimizer.numbers)}
    if run.schedule is not None:
        scalars["lr_scheduler"] = run.schedule.state_dict()
    save_checkpoint(
        storage,
        tag,
        communicator=run.communicator,
        pieces=[
            TensorPiece(fqn, kind, shape, buffer.dtype, at, buffer)
            for slot, kind, start, buffer in run.zero.owned_pieces()
            for fqn, shape, at in [stacking.in_whole(slot.param.fqn, slot.param.shape, start)]
        ],
        scalars=scalars,
        rank_blobs={},
        tag_validation=tag_validation,
        save_latest=save_latest,
    )


def load_run(
    run: TrainingRun,
    stacking: Stacking,
    storage: Storage,
    tag: str | None,
    *,
    optimizer_states: bool,
    schedule: bool,
    name_map: NameMap | None,
) -> tuple[str, dict[str, Any]]:
    """Take over a checkpoint's state. Collective. Returns its path and the client state."""
    run.zero.params.fence()
    saved = open_checkpoint(storage, tag, communicator=run.communicator)
    shapes = dict(stacking.in_whole(param.fqn, param.shape, 0)[:2] for param in run.zero.layout.params)
    reader = RenamedReader(saved, name_map, shapes, stacking.layers)
    check_names(run.zero, reader, strict=True)
    resumes = run.resumes_optimizer(reader, wanted=optimizer_states)
    read_state(run.zero, run.accelerator, reader, optimizer_states=optimizer_states, counts_updates=resumes)
    run.load_progress(reader)
    if resumes:
        run.load_groups(reader)
        if isinstance(run.zero.optimizer, OptaxOptimizer):
            run.zero.optimizer.numbers.update(reader.scalars["client_optimizer"][_OPTAX])
    if schedule and run.schedule is not None and reader.scalars["lr_scheduler"] is not None:
        run.schedule.load_state_dict(reader.scalars["lr_scheduler"])
    return f"{storage.location}/{reader.tag}", reader.scalars["client_state"]
