"""Configs of engines under trainers that accumulate gradients themselves."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from polyaccel.errors import PolyaccelError

TAG = "polyaccel"
"""The name of an engine's checkpoint inside a trainer's folder."""
_SHARED = (
    *("pipeline.stages", "mesh.pipe"),
    *("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size", "mesh.tensor"),
    *("sequence_parallel_size", "mesh.sequence"),
)
PRECISIONS: Mapping[str, dict[str, Any]] = {
    "fp32": {},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16": {"bf16": {"enabled": True}},
}


def engine_config(config: Mapping[str, Any] | str | PathLike[str] | None, stage: int, precision: str) -> dict[str, Any]:
    """Return the config of an engine that updates at each `step`.

    Raises PolyaccelError for a key that the trainer decides.
    """
    given: Mapping[str, Any] = (
        json.loads(Path(config).read_text()) if isinstance(config, str | PathLike) else config or {}
    )
    made = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 1, **copy.deepcopy(dict(given))}
    for key in ("gradient_accumulation_steps", "train_batch_size"):
        if key in made:
            hint = "leave it out: the trainer counts batches and accumulates gradients"
            raise PolyaccelError(f"a trainer's config has {key!r}", hint=hint, value=key)
    for key, size in _ranks_that_share(made):
        if size > 1:
            hint = f"leave {key} out: the trainer deals samples to each process, and runs whole models"
            raise PolyaccelError(f"{key} {size} under a trainer", hint=hint, value=size)
    if not {"bf16", "fp16", "torch_autocast"} & made.keys():
        made.update(copy.deepcopy(PRECISIONS[precision]))
    return made


def _ranks_that_share(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """How many ranks share one model's samples, by the key that says so."""
    found: list[tuple[str, int]] = []
    for key in _SHARED:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, int):
            found.append((key, value))
    return found
