"""The config of `polyaccel.init_inference`: a small table, and the engine's config that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from polyaccel.config.load import read_tree
from polyaccel.config.section import PositiveInt, Section
from polyaccel.config.validation import validate_tree
from polyaccel.errors import ConfigError, Problem

InferenceSource = str | Path | Mapping[str, Any]
_SOURCE = "init_inference"
INTEGER_BITS = {"int8": 8, "int4": 4}
"""Bits of the types of `dtype` that are integers."""


class InferenceTensorParallelConfig(Section):
    """Ranks that hold blocks of the same layers."""

    tp_size: PositiveInt = 1
    """Tensor ranks. It must divide the number of ranks; the others have copies of the model."""


class InferenceConfig(Section):
    """Keys of `polyaccel.init_inference`."""

    dtype: Literal["fp32", "bf16", "fp16", "int8", "int4"] | None = None
    """The type of the parameters; null leaves them. "int8" and "int4" hold weights of linear layers as integers with a
    scale a group, and leave the other parameters."""
    group_size: PositiveInt = 128
    """Weights in a row that share a scale, with integers."""
    tensor_parallel: InferenceTensorParallelConfig = InferenceTensorParallelConfig()
    """Layers over several ranks."""
    checkpoint: str | None = None
    """Weights to load: a directory of checkpoints, a folder or file of safetensors or bin, or a checkpoint that an
    installed importer reads."""
    max_out_tokens: PositiveInt | None = None
    """Tokens of a sequence at most, prompt and new ones together; null sets no bound."""
    replace_with_kernel_inject: bool = False
    """Accepted for scripts that have it. Kernels are the accelerator's; the model keeps its own layers."""


def load_inference_config(source: InferenceSource | None, named: Mapping[str, Any]) -> InferenceConfig:
    """Check the keys of `source`, a file or a mapping, together with `named` ones.

    Raises ConfigError for unknown keys and wrong values, and for a key that has one value in `source` and another one
    in `named`.
    """
    tree, problems, name = ({}, [], _SOURCE) if source is None else read_tree(source, _SOURCE)
    if not isinstance(tree, dict):
        problem = Problem("config", tree, "should be an object", 'write {"dtype": "bf16"}')
        raise ConfigError([problem], source=name)
    for key, value in named.items():
        if key in tree and tree[key] != value:
            problems.append(Problem(key, value, f"differs from the config's {tree[key]!r}", "give one of them"))
    found, wrong = validate_tree(InferenceConfig, {**tree, **named})
    if found is None or problems or wrong:
        raise ConfigError([*problems, *wrong], source=name)
    return found


def engine_config(config: InferenceConfig) -> dict[str, Any]:
    """Return the config of an engine that trains nothing."""
    tree: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    if config.dtype in ("bf16", "fp16"):
        tree[config.dtype] = {"enabled": True}
    if config.tensor_parallel.tp_size > 1:
        tree["tensor_parallel"] = {"autotp_size": config.tensor_parallel.tp_size}
    if config.max_out_tokens is not None:
        tree["hybrid_engine"] = {"enabled": True, "max_out_tokens": config.max_out_tokens}
    return tree
