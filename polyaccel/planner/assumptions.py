"""The config that a plan is made for: where a config leaves something open, a value is assumed and said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from polyaccel.config import Config, ResolvedConfig, resolve_config
from polyaccel.config.elastic import compute_elastic_config
from polyaccel.config.load import Source, draft_config
from polyaccel.config.meshes import data_ranks, on_mesh
from polyaccel.config.resolve import Triad, solve_triad
from polyaccel.config.sections.elasticity import ElasticityConfig
from polyaccel.config.sections.offload import BUILT_IN_DEVICES
from polyaccel.errors import ConfigError, Problem

_ASSUMED: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 1e-3,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_max_lr": 1e-3,
    "scheduler.params.warmup_num_steps": 100,
    "scheduler.params.total_num_steps": 10_000,
    "fp16.enabled": False,
    "bf16.enabled": False,
    "zero_optimization.reduce_bucket_size": 500_000_000,
}
"""Values in place of `"auto"`, which only a training script can decide. Of these only the precision and the bucket size
change a plan."""


@dataclass(frozen=True, slots=True)
class PlannedConfig:
    """A config to plan with. `assumptions`: one sentence for each value that neither the config nor a rule decides."""

    config: ResolvedConfig
    assumptions: tuple[str, ...]
    world_size: int
    """The ranks that train together: those of one replica group where there are several."""


def planned_config(source: Source, world_size: int, mesh: Mapping[str, int] = MappingProxyType({})) -> PlannedConfig:
    """Read `source` for a plan of `world_size` ranks, of which `mesh` says how many stand along some axes.

    `"auto"` gets the usual value. Batch sizes that do not fit `world_size` are replaced by the nearest that do, for a
    plan hardly depends on them, and a plugin's tier counts as host memory. Raises ConfigError for everything else that
    is wrong with the config.
    """
    draft = draft_config(source)
    if draft.problems:
        raise ConfigError(draft.problems, source=draft.source)
    config = on_mesh(draft.config, mesh)
    values = {key: value for key, value in _ASSUMED.items() if key in config.auto_keys}
    said = [f'{key} = {json.dumps(value)}: it is "auto" in the config' for key, value in values.items()]
    config, places = _known_places(config)
    said += places
    if config.diloco is not None:
        groups, ranks = config.diloco.replica_groups, world_size
        if ranks % groups:
            raise ConfigError([Problem("diloco.replica_groups", groups, f"should divide {ranks} ranks")])
        world_size = ranks // groups
        said.append(f"{world_size} of the {ranks} ranks, for diloco has {groups} replica groups")
    batch, why = _batch(config, data_ranks(config, world_size))
    if why:
        said.append(why)
    if config.elasticity.enabled:  # the sizes are decided
        config = config.model_copy(update={"elasticity": ElasticityConfig()})
    sizes = {"train_batch_size": batch.train, "train_micro_batch_size_per_gpu": batch.micro}
    fitting = config.model_copy(update={**sizes, "gradient_accumulation_steps": batch.gas})
    return PlannedConfig(resolve_config(fitting, world_size=world_size, hints=values), tuple(said), world_size)


def _known_places(config: Config) -> tuple[Config, list[str]]:
    """`config` with tiers whose memory a planner knows, and a sentence for each one that it does not."""
    zero, said = config.zero_optimization, []
    for name in ("offload_optimizer", "offload_param"):
        section = getattr(zero, name)
        if section.device not in BUILT_IN_DEVICES:
            said.append(f'zero_optimization.{name}.device = "cpu": the memory of tier {section.device!r} is not known')
            known = section.model_copy(update={"device": "cpu", "tier_options": type(section.tier_options)()})
            zero = zero.model_copy(update={name: known})
    return config.model_copy(update={"zero_optimization": zero}), said


def _batch(config: Config, world_size: int) -> tuple[Triad, str]:
    """Return batch sizes for `world_size` ranks, and a sentence on what was assumed."""
    train, micro, gas = (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )
    if config.elasticity.enabled:
        elastic = compute_elastic_config(config.elasticity)
        train = elastic.train_batch_size
        fits = world_size in elastic.world_sizes
        micro, gas = elastic.micro_batch_size(world_size) if fits else elastic.micro_batch_sizes[0], None
    solved = solve_triad(train, micro, gas, world_size=world_size)
    if isinstance(solved, Triad):
        return solved, ""
    gas = gas or 1
    micro = micro or max(1, round((train or 0) / (gas * world_size)))
    near = Triad(micro * gas * world_size, micro, gas)
    of = f"micro-batches of {micro}, {gas} a step on each of {world_size} ranks"
    if train is None:
        return near, f"train_batch_size = {near.train} ({of}): the config does not determine it"
    return near, f"train_batch_size = {near.train} ({of}): {train} does not fit, and training would refuse it"
