"""What follows from a config for a step: the layout of its parameters, its buffers, and what leaves the device.

The engine is built from these values (`runtime`), and the planner adds them up without an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import getLogger
from types import MappingProxyType

from polyaccel.config import ResolvedConfig
from polyaccel.config.sections.offload import OffloadDevice, OffloadOptimizerConfig, OffloadParamConfig
from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.offload.prefetch_pipeline import most_host_buffers
from polyaccel.offload.tier import Tier, TierOptions
from polyaccel.registry import PluginGroup, load_plugin
from polyaccel.zero.plan.bucket_plan import StepPlan, plan_step
from polyaccel.zero.plan.layout import Granule, ShardLayout, plan_layout
from polyaccel.zero.plan.placement import Offload, Place, first_shards, offloaded_buckets
from polyaccel.zero.plan.policy import (
    UNQUANTIZED,
    FeedbackPolicy,
    GatherPolicy,
    OuterPolicy,
    Placement,
    Precision,
    ReductionPolicy,
    StepPolicy,
    TrafficPolicy,
    ZeroPolicy,
)

log = getLogger(__name__)

PLACES: dict[OffloadDevice, Place] = {"none": Place.DEVICE, "cpu": Place.HOST, "nvme": Place.NVME}
"""Where the built-in tiers hold their buffers, by their names in configs."""
_LEAST_BUCKET_NUMEL = 4 * 1024 * 1024
_BUCKETS_AT_LEAST = 16


def plan_for(
    config: ResolvedConfig,
    specs: tuple[ParamSpec, ...],
    units: Callable[[], Mapping[str, str]],
    mesh: Mesh,
    rooms: Mapping[str, int] = MappingProxyType({}),
    parts: Mapping[str, str] = MappingProxyType({}),
    updates: Mapping[str, str] = MappingProxyType({}),
    granules: Mapping[str, Granule] = MappingProxyType({}),
    costs: Mapping[str, int] = MappingProxyType({}),
) -> ShardLayout:
    """Lay out `specs`; `units` gives the unit of each parameter, asked only where parameters are sharded. `rooms` has
    the most elements that any rank holds of a parameter that is cut (`plan_layout`); parameters of different `parts`
    share no bucket where every pass reduces its gradients, those of different `updates` nowhere. `granules` has what
    the optimizer needs whole of parameters (`plan_layout`), where its states are sharded, and `costs` the work for each
    element of those. `mesh.capacity` counts where states are sharded; equal ones state nothing.

    Buckets hold at most `zero_optimization.reduce_bucket_size` elements, and fewer for a small model, so that there are
    enough of them to overlap and to keep few under way.
    """
    zero = config.zero_optimization
    numels = {spec.fqn: rooms.get(spec.fqn, spec.numel) for spec in specs}
    total = sum(numels.values())
    wanted = max(_LEAST_BUCKET_NUMEL, total // _BUCKETS_AT_LEAST)
    cap = min(zero.reduce_bucket_size, wanted)
    policy = ZeroPolicy.of_stage(zero.stage)
    parts = parts if policy.grads is Placement.SHARDED else {}
    if updates:
        parts = {spec.fqn: f"{parts.get(spec.fqn, '')}/{updates.get(spec.fqn, '')}" for spec in specs}
    granules = granules if policy.optim is Placement.SHARDED else {}
    plan = partial(plan_layout, specs, mesh=mesh, max_bucket_numel=cap, rooms=rooms, parts=parts)
    stated = config.mesh.capacity or ()
    capacities = stated if policy.optim is Placement.SHARDED and len(set(stated)) > 1 else ()
    plan = partial(plan, granules=granules, costs=costs, capacities=capacities)
    if policy.params is not Placement.SHARDED:
        return plan()
    return plan(units=units(), persistent=persistent_params(config, numels))


def persistent_params(config: ResolvedConfig, numels: Mapping[str, int]) -> set[str]:
    """The small parameters that stay whole at stage 3, of all by their number of elements."""
    zero = config.zero_optimization
    persistent, left = set[str](), zero.model_persistence_threshold
    for fqn, numel in sorted(numels.items(), key=lambda item: item[1]):
        if numel <= zero.param_persistence_threshold and numel <= left:
            persistent.add(fqn)
            left -= numel
    return persistent


def gather_policy_for(config: ResolvedConfig, layout: ShardLayout) -> GatherPolicy:
    """The bounds on gathered parameters.

    Where the config does not state them, a small model gets tighter ones than DeepSpeed's defaults, which are made for
    billions of parameters and would never free anything: three units may be live. A stated bound below the largest
    bucket becomes that bucket, with a warning.
    """
    zero = config.zero_optimization
    stated = zero.model_fields_set
    units: dict[str, int] = {}
    gathered = [bucket for bucket in layout.buckets if not bucket.kind.persistent]
    for bucket in gathered:
        units[bucket.kind.unit] = units.get(bucket.kind.unit, 0) + bucket.numel
    unit = max(units.values(), default=0)

    def bound(name: str, value: int, tight: int) -> int:
        return value if name in stated else min(value, tight)

    max_live = bound("max_live_parameters", zero.max_live_parameters, 3 * unit)
    largest = max(gathered, key=lambda bucket: bucket.numel, default=None)
    if largest is not None and largest.numel > max_live:
        if ZeroPolicy.of_stage(zero.stage).params is Placement.SHARDED:
            log.warning(
                "zero_optimization.stage3_max_live_parameters = %d is less than the %d elements of the bucket of %r, "
                "which are gathered as one: %d it is. A smaller reduce_bucket_size makes smaller buckets",
                *(max_live, largest.numel, largest.slots[0].param.fqn, largest.numel),
            )
        max_live = largest.numel
    return GatherPolicy(
        max_live_numel=max_live,
        prefetch_numel=bound("prefetch_bucket_size", zero.prefetch_bucket_size, unit),
        max_reuse_numel=bound("max_reuse_distance", zero.max_reuse_distance, unit),
        warn_of_deviations=zero.log_trace_cache_warnings,
        is_fixed=zero.fixed_order,
    )


def step_plan_for(
    config: ResolvedConfig,
    layout: ShardLayout,
    state_names: Sequence[str],
    *,
    is_remote: bool,
    state_types: Mapping[str, DType] = MappingProxyType({}),
    group_states: Mapping[int, Sequence[str]] = MappingProxyType({}),
    rank: int | None = None,
) -> StepPlan:
    """The buffers of a step with an optimizer of these states, on `rank` (`plan_step`). `is_remote`: the device's
    memory is not the host's. Groups in `group_states` have those states alone."""
    return plan_step(
        layout,
        ZeroPolicy.of_stage(config.zero_optimization.stage),
        replace(step_policy(config), gathering=gather_policy_for(config, layout)),
        state_names=state_names,
        state_types=state_types,
        group_states=group_states,
        micro_batches=config.gradient_accumulation_steps,
        offload=offload_of(config, layout, len(state_names), is_remote=is_remote),
        traffic=traffic_policy_of(config),
        rank=rank,
    )


def traffic_policy_of(config: ResolvedConfig) -> TrafficPolicy:
    """How parameters and gradients travel: ZeRO++ where `zero_optimization` asks for it and parameters are sharded."""
    zero = config.zero_optimization
    if ZeroPolicy.of_stage(zero.stage).params is not Placement.SHARDED:
        return UNQUANTIZED
    errors = zero.zeropp_loco_param
    return TrafficPolicy(
        trained_bits=8 if zero.zero_quantized_weights else None,
        frozen_bits=8 if zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights else None,
        gradient_bits=4 if zero.zero_quantized_gradients else None,
        feedback=None if errors is None else FeedbackPolicy(errors.err_beta, errors.reset_T),
        near_ranks=zero.zero_hpz_partition_size,
    )


def offload_of(config: ResolvedConfig, layout: ShardLayout, state_count: int, *, is_remote: bool) -> Offload:
    """Which buckets' states and parameters leave the device, with `state_count` optimizer states for a parameter."""
    zero = config.zero_optimization
    section, params = zero.offload_optimizer, zero.offload_param
    place = storage_tier(section.device)
    states = offloaded_buckets(layout, 0.0 if place is Place.DEVICE else section.ratio)
    resting: dict[int, Place] = {}
    if params.device != "none" and ZeroPolicy.of_stage(zero.stage).params is Placement.SHARDED:
        in_host = first_shards(layout, params.max_in_cpu) if params.device == "nvme" else frozenset()
        resting = {
            bucket.index: Place.HOST if bucket.index in in_host else storage_tier(params.device)
            for bucket in layout.buckets
            if not bucket.kind.persistent
        }
    file_buffers = 0
    if place is Place.NVME:
        group = 1 + state_count  # the files of a bucket
        file_buffers = most_host_buffers(state_tier_options(section), group, len(states))
    return Offload(
        dict.fromkeys(sorted(states), place),
        resting,
        is_remote=is_remote,
        file_buffers=file_buffers,
        piece_buffers=params.buffer_count,
        state_piece_buffers=section.buffer_count,
        piece_numel=params.buffer_size,
    )


def storage_tier(device: OffloadDevice) -> Place:
    """Return where the tier `device` holds buffers: plugins' count as files unless resident."""
    if device in PLACES:
        return PLACES[device]
    return Place.HOST if load_plugin(PluginGroup.TIERS, device, Tier, Tier.API_VERSION).is_resident else Place.NVME


def state_tier_options(section: OffloadOptimizerConfig) -> TierOptions:
    """The settings of the tier of optimizer states, except for those that only a run has."""
    return TierOptions(
        path=section.nvme_path,
        pin_memory=section.pin_memory,
        buffer_count=section.buffer_count,
        pipeline_read=section.pipeline_read,
        pipeline_write=section.pipeline_write,
        own=section.tier_options,
    )


def param_tier_options(section: OffloadParamConfig) -> TierOptions:
    """The settings of the tiers of sharded parameters, except for those that only a run has."""
    return TierOptions(
        path=section.nvme_path,
        pin_memory=section.pin_memory,
        buffer_count=section.buffer_count,
        piece_numel=section.buffer_size,
        own=section.tier_options,
    )


def step_policy(config: ResolvedConfig) -> StepPolicy:
    """The step's policy, except for the bounds on gathered parameters."""
    zero = config.zero_optimization
    autocast_fp16 = config.torch_autocast.enabled and config.torch_autocast.dtype == "float16"
    reduce_dtype = config.communication_data_type
    accumulate_dtype = config.data_types.grad_accum_dtype
    narrow = _narrow_masters(config)
    return StepPolicy(
        clip_norm=config.gradient_clipping,
        skip_overflow=config.fp16.enabled or autocast_fp16 or (config.bf16.enabled and config.bf16.check_grad_overflow),
        defer_publish=zero.overlap_param_gather,
        measure_norm=zero.compute_grad_norm,
        require_all=not zero.ignore_unused_parameters,
        stochastic_rounding=narrow is not None
        or (config.bf16.enabled and config.bf16.stochastic_rounding)
        or (config.fp16.enabled and config.fp16.stochastic_rounding),
        noise_decay=None if config.gradient_noise_scale is None else config.gradient_noise_scale.decay,
        ema_decay=0.0 if config.ema is None else config.ema.decay,
        outer=_outer_policy(config),
        precision=Precision(
            master=narrow or DType.FLOAT32,
            keeps_16_bits=narrow is not None,
            reduce=DType.parse(reduce_dtype) if reduce_dtype else None,
            accumulate=DType.parse(accumulate_dtype) if accumulate_dtype else None,
            accumulates=config.gradient_accumulation_steps > 1,
        ),
        reduction=ReductionPolicy(
            average=config.gradient_allreduce_op == "mean",
            prescale=config.prescale_gradients,
            predivide_factor=config.gradient_predivide_factor,
            overlap=zero.overlap_comm is not False,
        ),
    )


def _outer_policy(config: ResolvedConfig) -> OuterPolicy | None:
    """How replica groups exchange what they have learned; None where there are none."""
    section = config.diloco
    if section is None:
        return None
    outer = section.outer_optimizer
    return OuterPolicy(
        groups=section.replica_groups,
        sync_every=section.sync_every,
        lr=outer.lr,
        momentum=outer.momentum,
        nesterov=outer.nesterov,
        bits=None if section.quantization_bits == 32 else section.quantization_bits,
        fragments=section.fragments,
        delay=section.fragment_sync_delay,
        alpha=section.fragment_update_alpha,
    )


def _narrow_masters(config: ResolvedConfig) -> DType | None:
    """The type of 16 bits in which parameters are their own master weights; None where those have 32."""
    if config.bf16.enabled and config.bf16.bf16_master_weights_and_grads:
        return DType.BFLOAT16
    return DType.FLOAT16 if config.fp16.enabled and config.fp16.fp16_master_weights_and_grads else None
