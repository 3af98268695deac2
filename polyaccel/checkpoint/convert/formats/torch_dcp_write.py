"""Writing torch's distributed checkpoints: what `get_state_dict(model, optimizer)` gives of plain torch, so that a
script's own `dcp.load` and `set_state_dict` take all of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.convert.exporting import ExportTensor, Progress
from polyaccel.checkpoint.convert.formats.torch_bin import on_disk
from polyaccel.checkpoint.format.tensors import BUFFER, PARAM

MODEL, OPTIMIZER, STATE, STEP = "model", "optimizer", "state", "step"
_CLASSES = {"Adam": "AdamW", "Sgd": "SGD", "Adagrad": "Adagrad", "Adamax": "Adamax"}
"""Of the optimizers that a config names, torch's class with the same states."""


def write(out: Path, reader: CheckpointReader, tensors: Sequence[ExportTensor], progress: Progress) -> list[str]:
    """Write parameters and buffers under `model`, optimizer states under `optimizer.state`, and the groups. Returns the
    names of the files. Raises CheckpointError for damage."""
    out.mkdir(parents=True, exist_ok=True)
    with on_disk(out, tensors, progress) as found:
        model = {tensor.name: found[tensor] for tensor in tensors if tensor.tensor.kind in (PARAM, BUFFER)}
        ties = reader.scalars.get("tied_weights") or {}
        model |= {other: model[first] for other, first in ties.items() if first in model}
        states: dict[str, dict[str, Any]] = {}
        for tensor in tensors:
            if tensor.tensor.kind not in (PARAM, BUFFER):
                states.setdefault(tensor.name, {})[tensor.tensor.kind] = found[tensor]
        tree: dict[str, Any] = {MODEL: model}
        if states:
            steps, numbers = reader.scalars.get("param_steps", {}), reader.scalars.get("client_optimizer") or {}
            for fqn, state in states.items():
                own = numbers.get(fqn) or {STEP: float(steps.get(fqn, 0))}
                state.update({name: torch.tensor(float(number)) for name, number in own.items()})
            params = [tensor.name for tensor in tensors if tensor.tensor.kind == PARAM]
            tree[OPTIMIZER] = {STATE: states, **_groups(reader, params)}
        with alone():
            save(tree, checkpoint_id=out, no_dist=True)
    return sorted(path.name for path in out.iterdir() if path.is_file())


@contextmanager
def alone() -> Iterator[None]:
    """Without the warning that there is no process group, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _groups(reader: CheckpointReader, params: Sequence[str]) -> dict[str, Any]:
    """The groups with all settings that torch's optimizer of the same kind has. Nothing where the checkpoint has no
    group for a parameter."""
    saved = reader.scalars.get("optimizer")
    groups = saved.get("param_groups", []) if isinstance(saved, Mapping) else []
    names = saved.get("param_names") if isinstance(saved, Mapping) else None
    if names is None:
        names = [[*params]] if len(groups) == 1 else None
    if names is None:
        return {}
    defaults = _defaults(str(reader.scalars.get("optimizer_kind") or reader.scalars.get("imported", {}).get("family")))
    found = []
    for group, members in zip(groups, names, strict=True):
        own = {"decoupled_weight_decay" if key == "decoupled" else key: value for key, value in group.items()}
        if defaults:
            own = {key: value for key, value in own.items() if key in defaults or key == "initial_lr"}
        found.append({**defaults, **own, "params": [*members]})
    return {"param_groups": found}


def _defaults(kind: str) -> dict[str, Any]:
    """The settings of torch's optimizer with the states of `kind`; nothing where torch has none."""
    name = _CLASSES.get(kind, kind.partition(" on ")[0].rpartition(".")[2])
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        return {}
    optimizer = found([torch.nn.Parameter(torch.zeros(1))], lr=0.0)  # type: ignore[call-arg]
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
