"""The tiers that a config names, opened for a run: where optimizer states and sharded parameters rest."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from time import time
from uuid import uuid4

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.detect import host_accelerator
from polyaccel.comm.base import Communicator
from polyaccel.config import ResolvedConfig
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.engine.policies.steps import param_tier_options, state_tier_options, storage_tier
from polyaccel.errors import ConfigError, Problem
from polyaccel.observability.traces.recorder import RunTrace
from polyaccel.offload.tier import Fetch, Tier, TierOptions
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
    """Open the tiers of optimizer states and parameters. Collective; `resident`: states must be in memory."""
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


class TracedTier(Tier):
    """`inner`, whose transfers are recorded in `trace` while it is on: each fetch from its start to its end, and each
    group of a walk from when it was asked for until it was there. `waited_s` is how long the rank did nothing else."""

    def __init__(self, inner: Tier, trace: RunTrace) -> None:
        self.inner = inner
        self._trace = trace
        self.name = inner.name  # type: ignore[misc]  # a class has one name, this attribute is for one tier
        self.is_resident = inner.is_resident  # type: ignore[misc]

    @property
    def compute(self) -> Accelerator:
        return self.inner.compute

    def open(self, accelerator: Accelerator, host: Accelerator, options: TierOptions) -> None:
        self.inner.open(accelerator, host, options)

    def allocate(self, key: str, numel: int, dtype: DType) -> Buffer:
        return self.inner.allocate(key, numel, dtype)

    def stage(self, numel: int, dtype: DType) -> Buffer:
        return self.inner.stage(numel, dtype)

    def fetch(self, source: Buffer, target: Buffer) -> Fetch:
        if not self._trace.is_on:
            return self.inner.fetch(source, target)
        began_s = time()
        return _TracedFetch(self.inner.fetch(source, target), self, began_s, source.nbytes)

    def stream_groups(self, groups: Sequence[Sequence[Buffer]]) -> Generator[list[Buffer], None, None]:
        walk = self.inner.stream_groups(groups)
        if not self._trace.is_on:
            yield from walk
            return
        try:
            for at, group in enumerate(groups):
                began_s = time()
                lent = next(walk)
                self.tell(f"read group {at}", began_s, time(), began_s, sum(buffer.nbytes for buffer in group))
                yield lent
            began_s = time()
            for _ in walk:
                pass
            self.tell("end of the walk", began_s, time(), began_s, 0)
        finally:
            walk.close()

    def close(self) -> None:
        self.inner.close()

    def tell(self, what: str, began_s: float, ended_s: float, waited_since_s: float, nbytes: int) -> None:
        """Record a transfer that was waited for since a moment."""
        more = {"tier": self.name, "nbytes": nbytes, "waited_s": max(0.0, ended_s - waited_since_s)}
        self._trace.span("tier", f"{self.name}: {what}", began_s, ended_s, **more)


class _TracedFetch(Fetch):
    def __init__(self, inner: Fetch, tier: TracedTier, began_s: float, nbytes: int) -> None:
        self._inner = inner
        self._tier = tier
        self._began_s = began_s
        self._nbytes = nbytes

    def finish(self) -> None:
        waits_s = time()
        self._inner.finish()
        self._tier.tell("fetch", self._began_s, time(), waits_s, self._nbytes)

    def cancel(self) -> None:
        self._inner.cancel()
