"""The composition root: a config goes in, live parts come out, and somebody closes them.

Nothing else knows both the config and the implementations. What a part needs of the config is handed to it as a value
of its own kind (`StepPolicy`, `LossScalePolicy`, ...), so no part reads JSON keys.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any
from uuid import uuid4

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.detect import host_accelerator
from polyaccel.accelerators.host_heap import keep_freed_memory
from polyaccel.comm.base import Communicator
from polyaccel.comm.default import default_communicator
from polyaccel.comm.quantized import QuantizedCommunicator
from polyaccel.comm.summary import start_log
from polyaccel.config import Config, ResolvedConfig, resolve_config
from polyaccel.config.offload import OffloadDevice
from polyaccel.engine.base import ModelAdapter
from polyaccel.engine.loss_scale import LossScaler
from polyaccel.engine.timing import PhaseTimer
from polyaccel.errors import ConfigError, Problem
from polyaccel.offload.tier import Tier, TierOptions
from polyaccel.registry import PluginGroup, load_plugin
from polyaccel.types import DType, ParamSpec
from polyaccel.zero.gathering import GatherPolicy
from polyaccel.zero.gradients import ReductionPolicy
from polyaccel.zero.layout import ShardLayout, plan_layout
from polyaccel.zero.optimizers import Adagrad, Adam, Group, Lamb, Lion, Sgd, SliceOptimizer
from polyaccel.zero.placement import StatePlacement, first_shards, offloaded_buckets
from polyaccel.zero.policy import Placement, ZeroPolicy
from polyaccel.zero.routes import Routes
from polyaccel.zero.step import ZeroStep
from polyaccel.zero.travel import AS_THEY_ARE, BLOCK_NUMEL, Bits, TravelPolicy
from polyaccel.zero.update import StepPolicy

log = getLogger(__name__)

NATIVE_OPTIMIZERS: dict[str, type[SliceOptimizer]] = {
    "Adam": Adam,
    "AdamW": Adam,
    "SGD": Sgd,
    "Adagrad": Adagrad,
    "Lion": Lion,
    "Lamb": Lamb,
}
"""What runs on slices through the kernel table, by the name that a resolved config uses."""

_TIERS: dict[OffloadDevice, str] = {"none": "device", "cpu": "host", "nvme": "nvme"}
"""Plugins by the names that configs have for them."""

_LEAST_BUCKET_NUMEL = 4 * 1024 * 1024
_BUCKETS_AT_LEAST = 16


@dataclass(frozen=True)
class Runtime:
    """The parts that a frontend builds an engine from."""

    config: ResolvedConfig
    accelerator: Accelerator
    communicator: Communicator
    policy: ZeroPolicy
    step_policy: StepPolicy
    param_dtype: DType | None
    """What floating parameters are held in; None: as the model has them."""

    def apply_to_process(self) -> None:
        """Do what concerns the whole process: memory kept between steps, and what the config asks, level of the log,
        garbage collection, the config shown."""
        if self.accelerator.works_on_host_memory:
            keep_freed_memory()
        if self.config.log_level is not None:
            getLogger("polyaccel").setLevel(self.config.log_level.upper())
        if self.config.disable_python_gc:
            gc.disable()
        if self.config.dump_state and self.communicator.rank == 0:
            log.info("resolved config:\n%s", self.config.to_json())

    def zero_step(
        self,
        adapter: ModelAdapter,
        optimizer: SliceOptimizer | None,
        groups: Sequence[Group],
        timer: PhaseTimer,
        *,
        resident: bool = False,
    ) -> ZeroStep:
        """The ZeRO step of `adapter`'s model. Collective; `resident` as in `place_states`, whose errors it raises."""
        layout = self.plan(tuple(adapter.param_specs()), adapter.unit_names)
        return ZeroStep(
            layout,
            self.policy,
            self.step_policy_for(layout),
            self.place_states(layout, resident=resident),
            optimizer,
            groups,
            self.communicator,
            self.accelerator,
            adapter.read_param,
            adapter,
            timer,
            self.routes(),
        )

    def plan(self, specs: tuple[ParamSpec, ...], units: Callable[[], Mapping[str, str]]) -> ShardLayout:
        """Lay out `specs` as the config says; see `plan_for`."""
        return plan_for(self.config, specs, units, self.communicator.world_size)

    def step_policy_for(self, layout: ShardLayout) -> StepPolicy:
        """The step's policy, with the bounds on gathered parameters that suit a layout; see `gather_policy_for`."""
        return replace(self.step_policy, gathering=gather_policy_for(self.config, layout))

    def routes(self) -> Routes:
        """How parameters and gradients travel (`travel_of`). Collective where near ranks keep second copies."""
        travel, communicator = travel_of(self.config), self.communicator
        near = None
        if travel.near_ranks > 1:
            for first in range(0, communicator.world_size, travel.near_ranks):
                near = communicator.split(range(first, first + travel.near_ranks)) or near
            if near is not None:
                near.barrier()  # every rank has joined before any may leave

        def route(gather_bits: Bits | None, reduce_bits: Bits | None) -> Communicator:
            if gather_bits is None and reduce_bits is None:
                return communicator
            return QuantizedCommunicator(
                communicator, gather_bits=gather_bits, reduce_bits=reduce_bits, block_numel=BLOCK_NUMEL
            )

        return Routes(
            exact=communicator,
            trained=route(travel.trained_bits, None),
            frozen=route(travel.frozen_bits, None),
            gradients=route(None, travel.gradient_bits),
            near=near,
        )

    def place_states(self, layout: ShardLayout, *, resident: bool) -> StatePlacement:
        """Open the tiers of `zero_optimization.offload_optimizer` and `offload_param`, and choose the buckets whose
        states or parameters leave the device.

        Collective. `resident`: the optimizer needs all states in memory. Raises ConfigError when they would not be, and
        OffloadError when the place cannot be used.
        """
        offload = self.config.zero_optimization.offload_optimizer
        device, tier = _new_tier("device"), _new_tier(_TIERS[offload.device])
        if resident and not tier.is_resident:
            expected = "works with polyaccel's own optimizers; one of torch steps on all states at once"
            cure = f'use "cpu", or one of {", ".join(NATIVE_OPTIMIZERS)} in the config'
            raise ConfigError([Problem("zero_optimization.offload_optimizer.device", offload.device, expected, cure)])
        run_id = self.communicator.broadcast_object(uuid4().hex)
        options = TierOptions(
            run_id=run_id,
            rank=self.communicator.rank,
            path=offload.nvme_path,
            pin_memory=offload.pin_memory,
            buffer_count=offload.buffer_count,
            pipeline_read=offload.pipeline_read,
            pipeline_write=offload.pipeline_write,
            piece_numel=self.config.zero_optimization.offload_param.buffer_size,
        )
        host = host_accelerator(self.accelerator)
        for each in (device, tier):
            each.open(self.accelerator, host, options)
        return StatePlacement(device, tier, offloaded_by(self.config, layout), self._place_params(layout, run_id))

    def _place_params(self, layout: ShardLayout, run_id: str) -> dict[int, Tier]:
        """Open the tiers of `zero_optimization.offload_param`, for the buckets that rest in them."""
        offload = self.config.zero_optimization.offload_param
        options = TierOptions(
            run_id=f"{run_id}-params",
            rank=self.communicator.rank,
            path=offload.nvme_path,
            pin_memory=offload.pin_memory,
            buffer_count=offload.buffer_count,
            piece_numel=offload.buffer_size,
        )
        places = params_offloaded_by(self.config, layout)
        tiers = {place: _new_tier(_TIERS[place]) for place in dict.fromkeys(places.values())}
        for tier in tiers.values():
            tier.open(self.accelerator, host_accelerator(self.accelerator), options)
        return {index: tiers[place] for index, place in places.items()}

    def loss_scaler(self) -> LossScaler:
        """The scaler of fp16 training; a constant 1 in every other precision."""
        autocast = self.config.torch_autocast
        if not self.config.fp16.enabled and not (autocast.enabled and autocast.dtype == "float16"):
            return LossScaler()
        fp16 = self.config.fp16
        return LossScaler.from_config(
            loss_scale=fp16.loss_scale,
            initial_scale_power=fp16.initial_scale_power,
            loss_scale_window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            min_loss_scale=fp16.min_loss_scale,
        )

    def native_optimizer(self) -> tuple[SliceOptimizer, dict[str, Any]] | None:
        """The config's optimizer with its group defaults, if it is one that runs on slices; None if it is another or
        none."""
        section = self.config.optimizer
        if section is None or section.type not in NATIVE_OPTIMIZERS:
            return None
        defaults = dict(section.params)
        if "adam_w_mode" in defaults:
            defaults["decoupled"] = defaults.pop("adam_w_mode")
        for switch in ("amsgrad", "torch_adam", "fp32_optimizer_states"):  # checked by the config, without other values
            defaults.pop(switch, None)
        return NATIVE_OPTIMIZERS[section.type](), defaults


def compose(parsed: Config, hints: Mapping[str, Any] | None = None, *, world_size: int | None = None) -> Runtime:
    """The runtime for a config over the default communicator.

    `world_size` counts what trains where that is not its processes. `hints` resolve values that are `"auto"`. Raises
    ConfigError, and CommError before `init_distributed`.
    """
    communicator = default_communicator()
    config = resolve_config(parsed, world_size=world_size or communicator.world_size, hints=hints)
    accelerator = communicator.accelerator
    param_dtype = param_dtype_of(config)
    if param_dtype is not None and param_dtype not in accelerator.supported_dtypes():
        key = "fp16.enabled" if config.fp16.enabled else "bf16.enabled"
        known = ", ".join(sorted(dtype.value for dtype in accelerator.supported_dtypes() if dtype.is_floating))
        expected = f"accelerator {accelerator.name!r} does not compute in {param_dtype.value}"
        raise ConfigError([Problem(key, True, expected, f"use one of its types: {known}")])
    logger = config.comms_logger
    if logger.enabled:
        ops = () if logger.prof_all else logger.prof_ops
        start_log(communicator, ops, verbose=logger.verbose, callers=logger.debug)
    return Runtime(
        config=config,
        accelerator=accelerator,
        communicator=communicator,
        policy=ZeroPolicy.of_stage(config.zero_optimization.stage),
        step_policy=step_policy_of(config),
        param_dtype=param_dtype,
    )


# What follows from a config alone, without live parts: the planner asks the same functions.


def plan_for(
    config: ResolvedConfig, specs: tuple[ParamSpec, ...], units: Callable[[], Mapping[str, str]], world_size: int
) -> ShardLayout:
    """Lay out `specs`; `units` gives the unit of each parameter, asked only where parameters are sharded.

    Buckets hold at most `zero_optimization.reduce_bucket_size` elements, and fewer for a small model, so that there are
    enough of them to overlap and to keep few under way.
    """
    zero = config.zero_optimization
    total = sum(spec.numel for spec in specs)
    wanted = max(_LEAST_BUCKET_NUMEL, total // _BUCKETS_AT_LEAST)
    cap = min(zero.reduce_bucket_size, wanted)
    if ZeroPolicy.of_stage(zero.stage).params is not Placement.SHARDED:
        return plan_layout(specs, world_size=world_size, max_bucket_numel=cap)
    persistent = set[str]()
    left = zero.model_persistence_threshold
    for spec in sorted(specs, key=lambda spec: spec.numel):
        if spec.numel <= zero.param_persistence_threshold and spec.numel <= left:
            persistent.add(spec.fqn)
            left -= spec.numel
    return plan_layout(specs, world_size=world_size, max_bucket_numel=cap, units=units(), persistent=persistent)


def gather_policy_for(config: ResolvedConfig, layout: ShardLayout) -> GatherPolicy:
    """The bounds on gathered parameters.

    Where the config does not state them, a small model gets tighter ones than DeepSpeed's defaults, which are made for
    billions of parameters and would never free anything: three units may be live.
    """
    zero = config.zero_optimization
    stated = zero.model_fields_set
    units: dict[str, int] = {}
    for bucket in layout.buckets:
        if not bucket.kind.persistent:
            units[bucket.kind.unit] = units.get(bucket.kind.unit, 0) + bucket.numel
    unit = max(units.values(), default=0)

    def bound(name: str, value: int, tight: int) -> int:
        return value if name in stated else min(value, tight)

    return GatherPolicy(
        max_live_numel=bound("max_live_parameters", zero.max_live_parameters, 3 * unit),
        prefetch_numel=bound("prefetch_bucket_size", zero.prefetch_bucket_size, unit),
        max_reuse_numel=bound("max_reuse_distance", zero.max_reuse_distance, unit),
        warn_of_deviations=zero.log_trace_cache_warnings,
    )


def travel_of(config: ResolvedConfig) -> TravelPolicy:
    """How parameters and gradients travel: ZeRO++ where `zero_optimization` asks for it and parameters are sharded."""
    zero = config.zero_optimization
    if ZeroPolicy.of_stage(zero.stage).params is not Placement.SHARDED:
        return AS_THEY_ARE
    return TravelPolicy(
        trained_bits=8 if zero.zero_quantized_weights else None,
        frozen_bits=8 if zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights else None,
        gradient_bits=4 if zero.zero_quantized_gradients else None,
        near_ranks=zero.zero_hpz_partition_size,
    )


def offloaded_by(config: ResolvedConfig, layout: ShardLayout) -> frozenset[int]:
    """The buckets whose states leave the device."""
    offload = config.zero_optimization.offload_optimizer
    return offloaded_buckets(layout, offload.ratio if offload.device != "none" else 0.0)


def params_offloaded_by(config: ResolvedConfig, layout: ShardLayout) -> dict[int, OffloadDevice]:
    """Where the shards of the sharded buckets rest that leave the device, by bucket."""
    zero = config.zero_optimization
    device = zero.offload_param.device
    if device == "none" or ZeroPolicy.of_stage(zero.stage).params is not Placement.SHARDED:
        return {}
    in_host = first_shards(layout, zero.offload_param.max_in_cpu)
    return {
        bucket.index: "cpu" if bucket.index in in_host else device
        for bucket in layout.buckets
        if not bucket.kind.persistent
    }


def param_dtype_of(config: ResolvedConfig) -> DType | None:
    """What floating parameters are held in; None: as the model has them."""
    if config.fp16.enabled:
        return DType.FLOAT16
    return DType.BFLOAT16 if config.bf16.enabled else None


def step_policy_of(config: ResolvedConfig) -> StepPolicy:
    """The step's policy, but for the bounds on gathered parameters."""
    zero = config.zero_optimization
    autocast_fp16 = config.torch_autocast.enabled and config.torch_autocast.dtype == "float16"
    reduce_dtype = config.communication_data_type
    accumulate_dtype = config.data_types.grad_accum_dtype
    return StepPolicy(
        clip_norm=config.gradient_clipping,
        skip_overflow=config.fp16.enabled or autocast_fp16 or (config.bf16.enabled and config.bf16.check_grad_overflow),
        defer_publish=zero.overlap_param_gather,
        measure_norm=zero.compute_grad_norm,
        require_all=not zero.ignore_unused_parameters,
        stochastic_rounding=(config.bf16.enabled and config.bf16.stochastic_rounding)
        or (config.fp16.enabled and config.fp16.stochastic_rounding),
        reduction=ReductionPolicy(
            average=config.gradient_allreduce_op == "mean",
            prescale=config.prescale_gradients,
            predivide_factor=config.gradient_predivide_factor,
            reduce_dtype=DType.parse(reduce_dtype) if reduce_dtype else None,
            accumulate_dtype=DType.parse(accumulate_dtype) if accumulate_dtype else None,
            accumulates=config.gradient_accumulation_steps > 1,
            overlap=zero.overlap_comm is not False,
        ),
    )


def _new_tier(name: str) -> Tier:
    tier = load_plugin(PluginGroup.TIERS, name, Tier, Tier.API_VERSION)()
    assert isinstance(tier, Tier)  # what loading checked
    return tier
