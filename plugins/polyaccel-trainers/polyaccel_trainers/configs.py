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
    if not {"bf16", "fp16", "torch_autocast"} & made.keys():
        made.update(copy.deepcopy(PRECISIONS[precision]))
    return made
