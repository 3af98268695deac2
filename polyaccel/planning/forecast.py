"""What one rank needs under every setting of stage and offload: memory, traffic of a step, disk for a checkpoint.

All of it is asked of the functions that the engine itself is built with: `runtime.plan_for` and its like for the
layout, `zero.memory` and `zero.traffic` for the figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

from polyaccel.config import ResolvedConfig
from polyaccel.planning.model import ModelShape
from polyaccel.runtime import (
    NATIVE_OPTIMIZERS,
    gather_policy_for,
    offloaded_by,
    params_offloaded_by,
    plan_for,
    step_policy_of,
    travel_of,
)
from polyaccel.zero.layout import ShardLayout
from polyaccel.zero.memory import MemoryEstimate, Offload, Place, estimate_layout
from polyaccel.zero.policy import ZeroPolicy
from polyaccel.zero.precision import Precision
from polyaccel.zero.schedule import plan_step
from polyaccel.zero.traffic import StepTraffic, step_traffic

OffloadDevice = Literal["none", "cpu", "nvme"]
_PLACES: dict[OffloadDevice, Place] = {"none": Place.DEVICE, "cpu": Place.HOST, "nvme": Place.NVME}
ADAM_STATES = 2
"""Tensors a parameter that an optimizer is taken to have when the config does not say which one it is."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A choice of `zero_optimization.stage`, `offload_optimizer.device` and `offload_param.device`."""

    stage: int
    offload: OffloadDevice
    offload_param: OffloadDevice = "none"

    @classmethod
    def of(cls, config: ResolvedConfig) -> Setting:
        """The config's own choice."""
        zero = config.zero_optimization
        return cls(zero.stage, zero.offload_optimizer.device, zero.offload_param.device)

    @property
    def offloaded(self) -> tuple[int, int]:
        """How far states and parameters leave the device; 0 is not at all."""
        places = list(_PLACES)
        return places.index(self.offload), places.index(self.offload_param)

    def applied_to(self, config: ResolvedConfig) -> ResolvedConfig:
        """`config` with this choice and everything else as it was."""
        zero = config.zero_optimization
        states = zero.offload_optimizer.model_copy(update={"device": self.offload})
        params = zero.offload_param.model_copy(update={"device": self.offload_param})
        changes = {"stage": self.stage, "offload_optimizer": states, "offload_param": params}
        return config.model_copy(update={"zero_optimization": zero.model_copy(update=changes)})


SETTINGS = (
    *(Setting(stage, offload) for stage, offload in product((0, 1, 2, 3), _PLACES)),
    Setting(3, "cpu", "cpu"),
    Setting(3, "nvme", "cpu"),
    Setting(3, "nvme", "nvme"),
)
"""Those that are worth comparing. Whoever moves parameters away moves the states first, which are larger."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a setting needs on each rank. `is_own`: it is the config's own setting."""

    setting: Setting
    memory: MemoryEstimate
    traffic: StepTraffic
    is_own: bool

    def fits(self, *, device_nbytes: int | None, host_nbytes: int | None) -> bool:
        """Whether the peaks stay within the limits; None is no limit."""
        limits = {Place.DEVICE: device_nbytes, Place.HOST: host_nbytes}
        return all(limit is None or self.memory.peak_nbytes(place) <= limit for place, limit in limits.items())


def forecasts(config: ResolvedConfig, model: ModelShape, world_size: int) -> tuple[Forecast, ...]:
    """A forecast for each of `SETTINGS` and the config's own one, on a device whose memory is not the host's."""
    own = Setting.of(config)
    found = []
    for setting in SETTINGS if own in SETTINGS else (*SETTINGS, own):
        changed = setting.applied_to(config)
        layout = plan_for(changed, model.specs, lambda: model.units, world_size)
        traffic = traffic_of(changed, layout)
        found.append(Forecast(setting, memory_of(changed, layout, is_remote=True), traffic, setting == own))
    return tuple(found)


def cheapest_first(found: Iterable[Forecast]) -> list[Forecast]:
    """By bytes sent in a step; of equal ones what offloads less, then what leaves more of the device."""
    return sorted(
        found,
        key=lambda forecast: (
            forecast.traffic.total_nbytes,
            forecast.setting.offloaded,
            forecast.memory.peak_nbytes(Place.DEVICE),
        ),
    )


def memory_of(config: ResolvedConfig, layout: ShardLayout, *, is_remote: bool) -> MemoryEstimate:
    """What the engine of `config` holds on each rank. `is_remote`: the device's memory is not the host's."""
    policy = ZeroPolicy.of_stage(config.zero_optimization.stage)
    reduction = step_policy_of(config).reduction
    gather_policy = gather_policy_for(config, layout)
    return estimate_layout(
        policy,
        layout,
        precision=precision_of(config),
        state_count=state_count(config),
        micro_batches=config.gradient_accumulation_steps,
        buckets_in_flight=reduction.max_in_flight if reduction.overlap else 1,
        max_gathered_numel=gather_policy.max_live_numel,
        offload=_offload(config, layout, is_remote),
        travel=travel_of(config),
        prefetch_numel=gather_policy.prefetch_numel,
    )


def traffic_of(config: ResolvedConfig, layout: ShardLayout) -> StepTraffic:
    """What each rank sends in a step of `config`."""
    policy = ZeroPolicy.of_stage(config.zero_optimization.stage)
    operations = plan_step(policy, layout, micro_batches=config.gradient_accumulation_steps)
    return step_traffic(operations, layout, precision_of(config), travel_of(config))


def checkpoint_nbytes(config: ResolvedConfig, model: ModelShape) -> int:
    """Disk for one checkpoint, all ranks together: parameters in the precision of their masters, states, buffers."""
    precision = precision_of(config)
    nbytes = model.buffer_nbytes
    for spec in model.specs:
        kept = precision.master_of(spec.dtype) if spec.trainable else spec.dtype
        states = state_count(config) * precision.states.itemsize if spec.trainable else 0
        nbytes += spec.numel * (kept.itemsize + states)
    return nbytes


def precision_of(config: ResolvedConfig) -> Precision:
    reduction = step_policy_of(config).reduction
    return Precision(reduce=reduction.reduce_dtype, accumulate=reduction.accumulate_dtype)


def state_count(config: ResolvedConfig) -> int:
    """States of the config's optimizer, tensors a parameter; Adam's where the config does not say."""
    section = config.optimizer
    native = None if section is None else NATIVE_OPTIMIZERS.get(section.type)
    return ADAM_STATES if native is None else len(native.state_names)


def _offload(config: ResolvedConfig, layout: ShardLayout, is_remote: bool) -> Offload:
    section, params = config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param
    place = _PLACES[section.device]
    places = dict.fromkeys(offloaded_by(config, layout), place)
    file_buffers = 0
    if place is Place.NVME:
        group = 1 + state_count(config)  # the files of a bucket
        at_once = 1 + section.pipeline_read + section.pipeline_write
        loans = max(section.buffer_count, at_once * group) // group if at_once > 1 else 1
        file_buffers = min(loans, len(places)) * group
    return Offload(
        places,
        file_buffers=file_buffers,
        is_remote=is_remote,
        params={index: _PLACES[device] for index, device in params_offloaded_by(config, layout).items()},
        piece_buffers=params.buffer_count,
        state_piece_buffers=section.buffer_count,
        piece_numel=params.buffer_size,
    )
