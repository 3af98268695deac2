"""The tiers that a config names, opened for a run: where optimizer states and sharded parameters rest."""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.detect import host_accelerator
from polyaccel.comm.base import Communicator
from polyaccel.config import ResolvedConfig
from polyaccel.engine.policies.steps import param_tier_options, state_tier_options, storage_tier
from polyaccel.errors import ConfigError, Problem
from polyaccel.observability.traces.recorder import RunTrace
from polyaccel.observability.traces.tiers import TracedTier
from polyaccel.offload.tier import Tier
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.registry import PluginGroup, load_plugin
from polyaccel.zero.plan.placement import Offload
from polyaccel.zero.resources import Tiers

_TIERS = {"none": "device", "cpu": "host"}
"""Tiers whose name in configs is not that of their plugin."""


def open_tiers(
    config: ResolvedConfig,
    offload: Offload,
    accelerator: Accelerator,
    communicator: Communicator,
    trace: RunTrace | None,
    *,
    resident: bool,
) -> Tiers:
    """Open the tiers of `zero_optimization.offload_optimizer`, and those of `offload_param` where buckets rest.

    Collective. `resident`: the optimizer needs all states in memory. Raises ConfigError when they would not be, and
    OffloadError when a place cannot be used.
    """
    states, params = config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param
    device = _new_tier("none")
    tier = device if states.device == "none" else _new_tier(states.device)
    if resident and not tier.is_resident:
        expected = "works with polyaccel's own optimizers; one of torch steps on all states at once"
        hint = f'use "cpu", or one of {", ".join(OPTIMIZERS)} in the config'
        raise ConfigError([Problem("zero_optimization.offload_optimizer.device", states.device, expected, hint)])
    run_id = communicator.broadcast_object(uuid4().hex)
    host, rank = host_accelerator(accelerator), communicator.rank
    options = replace(state_tier_options(states), run_id=run_id, rank=rank, piece_numel=params.buffer_size)
    for each in dict.fromkeys((device, tier)):
        each.open(accelerator, host, options)
    if trace is not None and tier is not device:
        tier = TracedTier(tier, trace)
    options = replace(param_tier_options(params), run_id=f"{run_id}-params", rank=rank)
    names = {storage_tier(name): name for name in ("cpu", params.device)}
    of_params = {place: _new_tier(names[place]) for place in dict.fromkeys(offload.params.values())}
    for each in of_params.values():
        each.open(accelerator, host, options)
    if trace is not None:
        of_params = {place: TracedTier(each, trace) for place, each in of_params.items()}
    return Tiers.around(device, {storage_tier(states.device): tier}, of_params)


def _new_tier(device: str) -> Tier:
    tier = load_plugin(PluginGroup.TIERS, _TIERS.get(device, device), Tier, Tier.API_VERSION)()
    assert isinstance(tier, Tier)  # what loading checked
    return tier
