"""`deepspeed.elasticity`, as DeepSpeed had it until 0.19.6: the batch that many numbers of GPUs can train with."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from logging import getLogger
from typing import Any

from polyaccel.config.elastic import ElasticBatch
from polyaccel.config.elastic import compute_elastic_config as solve
from polyaccel.config.sections.elasticity import ElasticityConfig
from polyaccel.config.validation import validate_tree
from polyaccel.errors import ConfigError, PolyaccelError

log = getLogger("polyaccel.deepspeed")

ELASTICITY = "elasticity"
ENABLED = "enabled"
ENABLED_DEFAULT = False
DEEPSPEED_ELASTICITY_CONFIG = "DEEPSPEED_ELASTICITY_CONFIG"
"""The variable in which a scheduler hands its config to the ranks."""
LATEST_ELASTICITY_VERSION = 0.2
MINIMUM_DEEPSPEED_VERSION = "0.3.8"


class ElasticityError(PolyaccelError):
    """What is wrong with an elastic job."""


class ElasticityConfigError(ElasticityError):
    """A section `elasticity` that cannot be used."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """A number of GPUs that the batch cannot be divided by."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether a config asks for it."""
    return bool(ds_config.get(ELASTICITY, {}).get(ENABLED, ENABLED_DEFAULT))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Raise ElasticityConfigError where the section differs from the one that the scheduler has planned with."""
    text = os.environ.get(DEEPSPEED_ELASTICITY_CONFIG)
    if text is None:
        log.warning("%s is not set: the scheduler may have planned with another section", DEEPSPEED_ELASTICITY_CONFIG)
        return
    planned, found = _section(json.loads(text)), _section(runtime_elastic_config_dict)
    for name in ("max_train_batch_size", "micro_batch_sizes", "version"):
        ours, theirs = getattr(found, name), getattr(planned, name)
        if ours != theirs:
            raise ElasticityConfigError(
                f"elasticity.{name} = {ours}, and the scheduler has planned with {theirs}",
                hint=f"write the same in the config and in {DEEPSPEED_ELASTICITY_CONFIG}",
                value=ours,
            )


def compute_elastic_config(
    ds_config: Mapping[str, Any] | str,
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """The global batch and the numbers of GPUs that can train with it; with a `world_size`, or where it is asked for,
    the micro-batch too.

    Version 0.2 needs a `world_size`, or WORLD_SIZE of the environment, and takes it even where it does not suit: then
    the batch is another one, as in DeepSpeed. Raises ElasticityConfigError and ElasticityIncompatibleWorldSize.
    """
    tree = json.loads(ds_config) if isinstance(ds_config, str) else ds_config
    if ELASTICITY not in tree:
        raise ElasticityConfigError("the config has no section elasticity", hint='add "elasticity": {...}')
    if not elasticity_enabled(tree):
        raise ElasticityConfigError("elasticity.enabled is not true", hint='write "enabled": true')
    _require_version(target_deepspeed_version)
    section = _section(tree[ELASTICITY])
    if section.version == 0.1 and section.model_parallel_size > 1:
        raise ElasticityConfigError(
            f"version 0.1 of elasticity, and elasticity.model_parallel_size = {section.model_parallel_size}",
            hint='write "version": 0.2',
            value=section.model_parallel_size,
        )
    try:
        batch = solve(section)
    except ConfigError as error:
        raise ElasticityConfigError(error.message, value=error.value) from error
    if section.version == 0.1:
        return _of_ranks(batch, world_size, return_microbatch)
    world_size = world_size or int(os.environ.get("WORLD_SIZE", "0"))
    if not world_size:
        hint = "pass world_size, or set WORLD_SIZE"
        raise ElasticityConfigError("version 0.2 of elasticity needs the number of GPUs", hint=hint)
    if world_size // section.model_parallel_size in batch.world_sizes:
        micro = batch.micro_batch_size(world_size // section.model_parallel_size)
    else:
        batch, micro = _of_any(section, world_size)
    found = (batch.train_batch_size, list(batch.world_sizes))
    return (*found, micro) if return_microbatch else found


def _require_version(target: str) -> None:
    """Raise ElasticityError for a version that had no elasticity."""
    numbers = [int(number) for number in re.findall(r"\d+", target)[:3]]
    if numbers and numbers < [int(number) for number in MINIMUM_DEEPSPEED_VERSION.split(".")]:
        raise ElasticityError(
            f"target_deepspeed_version={target!r} has no elasticity",
            hint=f"name {MINIMUM_DEEPSPEED_VERSION} or a later one",
            value=target,
        )


def _of_ranks(batch: ElasticBatch, world_size: int, return_microbatch: bool) -> tuple[Any, ...]:
    found = (batch.train_batch_size, list(batch.world_sizes))
    if world_size > 0:
        if world_size not in batch.world_sizes:
            raise ElasticityIncompatibleWorldSize(
                f"{world_size} GPUs do not divide the batch of {batch.train_batch_size}",
                hint=f"use one of {', '.join(map(str, batch.world_sizes))}",
                value=world_size,
            )
        return (*found, batch.micro_batch_size(world_size))
    return (*found, batch.micro_batch_sizes[0]) if return_microbatch else found


def _of_any(section: ElasticityConfig, world_size: int) -> tuple[ElasticBatch, int]:
    """Version 0.2's answer to a number of GPUs that its batch does not suit: the largest batch (or the smallest) that
    this number can train with alone."""
    ranks = world_size // section.num_gpus_per_node * (section.num_gpus_per_node // section.model_parallel_size)
    most = section.max_train_batch_size or 0
    fitting = {most // (size * ranks) * size * ranks: size for size in section.micro_batch_sizes if ranks}
    batches = [batch for batch in fitting if batch]
    if not batches:
        raise ElasticityIncompatibleWorldSize(
            f"{world_size} GPUs train more than max_train_batch_size = {most} samples with any micro-batch",
            hint="raise elasticity.max_train_batch_size, or allow a smaller micro-batch",
            value=world_size,
        )
    chosen = max(batches) if section.prefer_larger_batch else min(batches)
    sizes = [size for size in section.micro_batch_sizes if chosen // ranks % size == 0]
    micro = max(sizes) if section.prefer_larger_batch else sizes[0]
    return ElasticBatch(chosen, (ranks,), (micro,)), micro


def _section(tree: Mapping[str, Any]) -> ElasticityConfig:
    section, problems = validate_tree(ElasticityConfig, dict(tree), prefix=(ELASTICITY,))
    if section is None or problems:
        raise ElasticityConfigError("; ".join(map(str, problems)), value=dict(tree))
    return section
