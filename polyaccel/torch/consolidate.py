"""One file with all weights in it, as tools outside of any training engine read them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from polyaccel.errors import CheckpointError

if TYPE_CHECKING:
    from polyaccel.torch.engine import TorchEngine


def consolidated_state_dict(engine: TorchEngine, *, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
    """The module's state dict on rank 0, in host memory and in the types that are trained with; empty elsewhere.

    Collective. One bucket is whole at a time. Tied parameters share one tensor. Raises PolyaccelError after half an
    update.
    """
    engine.zero.require_whole()
    values = {}
    is_writer = engine.communicator.rank == 0
    params = engine.zero.params
    for place in params:
        index = place.bucket.index
        with params.peek(index) as full:
            for slot in place.bucket.slots if is_writer else ():
                flat = full.view(slot.offset, slot.param.numel).raw
                values[slot.param.fqn] = flat.detach().to("cpu", copy=True).view(slot.param.shape)
    if not is_writer:
        return {}
    names = engine.adapter.names
    entries: dict[str, Any] = {}
    for key, entry in engine.module.state_dict(keep_vars=True).items():
        if isinstance(entry, nn.Parameter) and entry in names:
            if engine.adapter.is_trained(names[entry]) or not exclude_frozen_parameters:
                entries[key] = values[names[entry]]
        else:
            entries[key] = entry.detach().to("cpu", copy=True) if isinstance(entry, Tensor) else entry
    return entries


def save_consolidated(
    engine: TorchEngine, folder: str | os.PathLike[str], filename: str, *, exclude_frozen: bool
) -> None:
    """Write that state dict to `folder/filename`: safetensors if the name ends so, else as `torch.save` does.

    Collective; the file is complete on rank 0's disk when it returns on any rank. Raises CheckpointError on all ranks
    when it cannot be written.
    """
    entries = consolidated_state_dict(engine, exclude_frozen_parameters=exclude_frozen)
    problem = ""
    if engine.communicator.rank == 0:
        try:
            _write(entries, Path(folder) / filename)
        except (OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
    problem = engine.communicator.broadcast_object(problem)
    if problem:
        path = str(Path(folder) / filename)
        raise CheckpointError(
            f"the weights cannot be written to {path}: {problem}",
            cure="look at the folder's room and rights",
            value=path,
        )


def _write(entries: dict[str, Any], path: Path) -> None:
    """Beside the target first, so that a crash leaves no half file under its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        if path.suffix == ".safetensors":
            save_file(_apart({name: entry for name, entry in entries.items() if isinstance(entry, Tensor)}), draft)
        else:
            torch.save(entries, draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _apart(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each name with memory of its own, for the format knows no sharing: tied weights are written under every name."""
    seen: set[int] = set()
    apart = {}
    for name, entry in entries.items():
        key = entry.untyped_storage().data_ptr()
        apart[name] = entry.clone() if key in seen else entry.contiguous()
        seen.add(key)
    return apart
