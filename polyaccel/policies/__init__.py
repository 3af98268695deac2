"""Values that follow from a config alone: layouts, policies, and the buckets that leave the device.

The engine is built from them (`runtime`), and the planner adds them up without an engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import getLogger
from types import MappingProxyType
from typing import Any

from polyaccel.checkpoint.replica.replicas import ReplicaPolicy
from polyaccel.checkpoint.retention.rules import KeepBest, Retention
from polyaccel.checkpoint.saver import SavePolicy
from polyaccel.config import Config, ResolvedConfig
from polyaccel.config.sections.offload import OffloadDevice, OffloadOptimizerConfig
from polyaccel.engine.base import EngineSettings
from polyaccel.mesh import Mesh
from polyaccel.offload.tier import Tier, TierOptions
from polyaccel.offload.walk import most_host_buffers
from polyaccel.policies.watching import reporting_of
from polyaccel.registry import PluginGroup, load_plugin
from polyaccel.types import DType, ParamSpec
from polyaccel.zero.plan.bucket_plan import StepPlan, plan_step
from polyaccel.zero.plan.layout import ShardLayout, plan_layout
from polyaccel.zero.plan.placement import Offload, Place, first_shards, offloaded_buckets
from polyaccel.zero.plan.policy import (
    AS_THEY_ARE,
    GatherPolicy,
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

_COMMON_SETTINGS = {
    "gradient_accumulation_steps", "optimizer", "scheduler", "gradient_clipping", "prescale_gradients",
    "gradient_predivide_factor", "gradient_allreduce_op", "communication_data_type", "zero_optimization", "fp16",
    "bf16", "torch_autocast", "data_types", "matrix_kernels",
}  # fmt: skip


def plan_for(
    config: ResolvedConfig,
    specs: tuple[ParamSpec, ...],
    units: Callable[[], Mapping[str, str]],
    mesh: Mesh,
    rooms: Mapping[str, int] = MappingProxyType({}),
    parts: Mapping[str, str] = MappingProxyType({}),
) -> ShardLayout:
    """Lay out `specs`; `units` gives the unit of each parameter, asked only where parameters are sharded. `rooms` has
    the most elements that any rank holds of a parameter that is cut (`plan_layout`); parameters of different `parts`
    share no bucket where every pass reduces its gradients.

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
    plan = partial(plan_layout, specs, mesh=mesh, max_bucket_numel=cap, rooms=rooms, parts=parts)
    if policy.params is not Placement.SHARDED:
        return plan()
    persistent, left = set[str](), zero.model_persistence_threshold
    for fqn, numel in sorted(numels.items(), key=lambda item: item[1]):
        if numel <= zero.param_persistence_threshold and numel <= left:
            persistent.add(fqn)
            left -= numel
    return plan(units=units(), persistent=persistent)


def gather_policy_for(config: ResolvedConfig, layout: ShardLayout) -> GatherPolicy:
    """The bounds on gathered parameters.

    Where the config does not state them, a small model gets tighter ones than DeepSpeed's defaults, which are made for
    billions of parameters and would never free anything: three units may be live. A stated bound below the largest
    bucket becomes that bucket, and a warning says so.
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
    )


def step_plan_for(
    config: ResolvedConfig, layout: ShardLayout, state_names: Sequence[str], *, is_remote: bool
) -> StepPlan:
    """The buffers of a step with an optimizer of these states. `is_remote`: the device's memory is not the host's."""
    return plan_step(
        layout,
        ZeroPolicy.of_stage(config.zero_optimization.stage),
        replace(step_policy_of(config), gathering=gather_policy_for(config, layout)),
        state_names=state_names,
        micro_batches=config.gradient_accumulation_steps,
        offload=offload_of(config, layout, len(state_names), is_remote=is_remote),
        traffic=traffic_policy_of(config),
    )


def traffic_policy_of(config: ResolvedConfig) -> TrafficPolicy:
    """How parameters and gradients travel: ZeRO++ where `zero_optimization` asks for it and parameters are sharded."""
    zero = config.zero_optimization
    if ZeroPolicy.of_stage(zero.stage).params is not Placement.SHARDED:
        return AS_THEY_ARE
    return TrafficPolicy(
        trained_bits=8 if zero.zero_quantized_weights else None,
        frozen_bits=8 if zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights else None,
        gradient_bits=4 if zero.zero_quantized_gradients else None,
        near_ranks=zero.zero_hpz_partition_size,
    )


def offload_of(config: ResolvedConfig, layout: ShardLayout, state_count: int, *, is_remote: bool) -> Offload:
    """Which buckets' states and parameters leave the device, with `state_count` optimizer states for a parameter."""
    zero = config.zero_optimization
    section, params = zero.offload_optimizer, zero.offload_param
    place = place_of(section.device)
    states = offloaded_buckets(layout, 0.0 if place is Place.DEVICE else section.ratio)
    resting: dict[int, Place] = {}
    if params.device != "none" and ZeroPolicy.of_stage(zero.stage).params is Placement.SHARDED:
        in_host = first_shards(layout, params.max_in_cpu) if params.device == "nvme" else frozenset()
        resting = {
            bucket.index: Place.HOST if bucket.index in in_host else place_of(params.device)
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


def place_of(device: OffloadDevice) -> Place:
    """Where the tier that a config names `device` holds its buffers.

    Another plugin's tier counts as files where its buffers are not resident, else as host memory. Raises PluginNotFound
    for one that is not installed.
    """
    if device in PLACES:
        return PLACES[device]
    return Place.HOST if load_plugin(PluginGroup.TIERS, device, Tier, Tier.API_VERSION).is_resident else Place.NVME


def state_tier_options(section: OffloadOptimizerConfig) -> TierOptions:
    """The settings of the tier of optimizer states, but for those that only a run knows."""
    return TierOptions(
        path=section.nvme_path,
        pin_memory=section.pin_memory,
        buffer_count=section.buffer_count,
        pipeline_read=section.pipeline_read,
        pipeline_write=section.pipeline_write,
        own=section.tier_options,
    )


def param_dtype_of(config: ResolvedConfig) -> DType | None:
    """The element type in which floating parameters are held; None: as the model has them."""
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
        precision=Precision(
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


def engine_settings_of(config: ResolvedConfig) -> EngineSettings:
    """The settings that every frontend's engine counts with and answers to users."""
    return EngineSettings(
        train_batch_size=config.train_batch_size,
        micro_batch_size=config.train_micro_batch_size_per_gpu,
        accumulation_steps=config.gradient_accumulation_steps,
        zero_stage=config.zero_optimization.stage,
        gradient_clipping=config.gradient_clipping,
        reporting=reporting_of(config),
        counts_work=config.timers.throughput.enabled,
        saving=save_policy_of(config),
    )


def save_policy_of(config: ResolvedConfig) -> SavePolicy:
    """How engines save."""
    storage, options = config.checkpoint.storage_plugin
    best, replica = config.checkpoint.keep_best, config.checkpoint.replica_section
    return SavePolicy(
        tag_validation=config.checkpoint.tag_validation,
        in_background=config.checkpoint.in_background,
        staging_nbytes=config.checkpoint.staging_memory,
        retention=Retention(
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
            keep_best=KeepBest(best.metric, best.mode, best.count) if best else None,
        ),
        replica=None if replica is None else ReplicaPolicy(replica.memory),
        storage=storage,
        options=json.loads(json.dumps(options)),  # without the tables that refuse to change
        allows_bytes=config.checkpoint.allow_bytes,
    )


@dataclass(frozen=True, slots=True)
class LeafRules:
    """Which modules are leaves: their parameters are gathered together.

    `classes`, `names` and `name_suffixes` choose modules; a choice whose kind is in `stated` must match one.
    `granularity` makes leaves of modules that are that fine or finer (elements a module); 0 is off.
    """

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()
    stated: frozenset[str] = frozenset()
    granularity: int = 0


@dataclass(frozen=True, slots=True)
class ModuleRules:
    """The changes to a module before an engine takes it.

    `param_dtype` and `buffer_dtype` are the types of floating parameters and buffers; None leaves them. Buffers of
    modules named in `keep_in_fp32` stay as they are; None asks the module.
    """

    param_dtype: DType | None = None
    buffer_dtype: DType | None = None
    keep_in_fp32: tuple[str, ...] | None = None
    leaves: LeafRules = LeafRules()


def common_settings_of(config: ResolvedConfig) -> dict[str, Any]:
    """The part of the config that must be equal on all ranks, as a tree: what numbers and exchanges depend on. Where
    files lie may differ."""
    tree: dict[str, Any] = config.model_dump(mode="json", by_alias=True, include=_COMMON_SETTINGS)
    for section in ("offload_param", "offload_optimizer"):
        offload = tree["zero_optimization"].get(section) or {}
        for key in ("nvme_path", "tier_options"):
            offload.pop(key, None)
    return tree


def module_rules_of(config: ResolvedConfig) -> ModuleRules:
    """The rules for the config's module."""
    zero, types = config.zero_optimization, config.data_types
    leaf = zero.leaf_module
    return ModuleRules(
        param_dtype=param_dtype_of(config),
        buffer_dtype=DType.parse(types.buffer_dtype) if types.buffer_dtype else None,
        keep_in_fp32=None if types.keep_in_fp32_modules == "auto" else types.keep_in_fp32_modules,
        leaves=LeafRules(
            leaf.classes,
            leaf.names,
            leaf.name_suffixes,
            frozenset(leaf.model_fields_set),
            zero.module_granularity_threshold,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePolicy:
    """Which activations are computed again in backward, and where the inputs of what is computed again wait for it.

    `names` are classes or full names of the modules to recompute; empty means that they are found. `keep` names
    operations whose results are kept. `memory_limit` counts bytes. `number` is that of the regions whose inputs get
    contiguous memory; None gives each input its own.
    """

    recomputes_blocks: bool = False
    names: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    memory_limit: int | None = None
    reentrant: bool = False
    offload: bool = False
    partition: bool = False
    number: int | None = None
    synchronize: bool = False
    profile: bool = False


def recompute_policy_of(config: Config) -> RecomputePolicy:
    """The recomputation that the config asks for."""
    section = config.activation_checkpointing
    return RecomputePolicy(
        recomputes_blocks=section.recomputes_blocks,
        names=section.blocks,
        keep=section.keep,
        memory_limit=section.memory_limit,
        reentrant=section.use_reentrant,
        offload=section.cpu_checkpointing,
        partition=section.partition_activations,
        number=section.number_checkpoints if section.contiguous_memory_optimization else None,
        synchronize=section.synchronize_checkpoint_boundary,
        profile=section.profile,
    )


@dataclass(frozen=True, slots=True)
class CutRules:
    """Which layers tensor ranks share. `layers` has for each entry of the config patterns of names, `column`, `row` or
    `skip`, the lengths of a fused weight's parts (None: one part) and the dimension that has them (None: that which is
    cut). `use_defaults`: beside those what the model says of itself, or its structure. `gather_logits`: every rank has
    all logits. `share_tokens`: between these layers each rank has some of the tokens."""

    layers: tuple[tuple[Any, ...], ...] = ()
    use_defaults: bool = True
    gather_logits: bool = True
    share_tokens: bool = False


def cut_rules_of(config: ResolvedConfig) -> CutRules:
    """The rules of `tensor_parallel`."""
    section = config.tensor_parallel
    partition = section.partition_config
    return CutRules(
        tuple(
            (each.patterns, each.partition_type, each.shape, each.partition_dim)
            for each in (partition.layer_specs if partition is not None else ())
        ),
        partition is None or partition.use_default_specs,
        not section.vocab_parallel_lm_head,
        section.sequence_sharded,
    )
