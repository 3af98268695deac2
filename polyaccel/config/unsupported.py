"""The one list of known keys whose feature does not exist yet. It shrinks with each version.

A key here may stand in a config as long as its value asks for nothing: its default, which is what leaving it out means.
Any other value is an error, never ignored. An option of a feature that is off (`wandb.project` with `wandb.enabled`
false) asks for nothing either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from polyaccel.config.keys import json_name
from polyaccel.config.root import Config
from polyaccel.config.section import Section
from polyaccel.errors import Problem


@dataclass(frozen=True, slots=True)
class Gap:
    """A key or section, the feature behind it, the cure, and which values ask for it (None: all but the default)."""

    key: str
    feature: str
    cure: str = "leave the key out"
    asks: Callable[[Any], bool] | None = None


_ABSENT_OPTIMIZERS = ("muon", "muadam", "muadamw", "musgd", "onebitadam", "onebitlamb", "zerooneadam")
_ZERO = "zero_optimization."

GAPS: tuple[Gap, ...] = (
    Gap("managed_gradient_accumulation", "gradient accumulation counted by the caller"),
    Gap("optimizer.type", "this optimizer", "use Adam, AdamW, Lion or Lamb", lambda v: v.lower() in _ABSENT_OPTIMIZERS),
    Gap("optimizer.legacy_fusion", "DeepSpeed's older fused Lamb"),
    Gap("seq_parallel_communication_data_type", "sequence parallelism"),
    Gap("memory_breakdown", "the memory breakdown"),
    Gap("disable_allgather", "a switch that DeepSpeed itself does not read"),
    Gap("fp16.fp16_master_weights_and_grads", "float16 master weights"),
    Gap("bf16.immediate_grad_update", "immediate float32 accumulation"),
    Gap("bf16.bf16_master_weights_and_grads", "bfloat16 master weights"),
    Gap("bf16.bf16_optimizer_states", "bfloat16 optimizer states"),
    Gap("torch_autocast.lower_precision_safe_modules", "a choice of modules whose gradients travel in 16 bits"),
    Gap(_ZERO + "use_multi_rank_bucket_allreduce", "one reduction an owner"),
    Gap(_ZERO + "allgather_partitions", "one broadcast an owner"),
    Gap(_ZERO + "contiguous_gradients", "gradients outside contiguous buckets"),
    Gap(_ZERO + "reduce_scatter", "reducing sharded gradients without a reduce-scatter"),
    Gap(_ZERO + "round_robin_gradients", "rotating ownership (slices are equal already)"),
    Gap(_ZERO + "legacy_stage1", "the older stage 1", 'use "stage": 1'),
    Gap(_ZERO + "load_from_fp32_weights", "loading master weights from 16-bit ones"),
    Gap(_ZERO + "elastic_checkpoint", "DeepSpeed's elastic checkpoint format"),
    Gap(_ZERO + "offload_optimizer.super_offload", "SuperOffload"),
    Gap(_ZERO + "zenflow", "ZenFlow"),
    Gap(_ZERO + "sub_group_size", "updating in tiles (stage 3)"),
    Gap(_ZERO + "stage3_use_all_reduce_for_fetch_params", "gathering by an all-reduce"),
    Gap(_ZERO + "stage3_allgather_sequential", "gathering parameter by parameter"),
    Gap(_ZERO + "pipeline_loading_checkpoint", "loading rank after rank"),
    Gap(_ZERO + "save_muon_momentum_buffer_in_memory", "Muon"),
    Gap("timers.throughput.enabled", "training without the throughput figures", "leave it on; it costs nothing"),
    Gap("timers.throughput.synchronized", "timing that waits for the device"),
    Gap("flops_profiler.enabled", "the operation profiler"),
    Gap("tensorboard.enabled", "the TensorBoard monitor", "read the run's metrics.jsonl"),
    Gap("csv_monitor.enabled", "the CSV monitor", "read the run's metrics.jsonl"),
    Gap("wandb.enabled", "the Weights & Biases monitor", "read the run's metrics.jsonl"),
    Gap("comet.enabled", "the Comet monitor", "read the run's metrics.jsonl"),
    Gap("data_efficiency.enabled", "the data efficiency library"),
    Gap("checkpoint.load_universal", "DeepSpeed's universal checkpoint format"),
    Gap("checkpoint.use_node_local_storage", "checkpoints on each host's own disk"),
    Gap("checkpoint.parallel_write", "a choice of writing ranks"),
    Gap("checkpoint.checkpoint_serialization", "a choice of serialisation"),
    Gap("checkpoint.writer", "DeepSpeed's fast checkpoint writer"),
    Gap("datastates_ckpt", "the DataStates checkpoint writer"),
    Gap("activation_checkpointing.partition_activations", "sharding activations over model-parallel ranks"),
    Gap("activation_checkpointing.number_checkpoints", "one buffer for all activations"),
    Gap("activation_checkpointing.contiguous_memory_optimization", "one buffer for all activations"),
    Gap("activation_checkpointing.synchronize_checkpoint_boundary", "waiting for the device at each checkpoint"),
    Gap("activation_checkpointing.profile", "timing each checkpoint"),
    Gap("aio", "tuning of file access"),
    Gap("sequence_parallel_size", "sequence parallelism"),
    Gap("use_data_before_expert_parallelism", "expert parallelism"),
    Gap("pipeline", "pipeline parallelism"),
    Gap("tensor_parallel", "tensor parallelism"),
    Gap("expert_parallel.enabled", "expert parallelism"),
    Gap("compile", "DeepCompile"),
    Gap("hybrid_engine.enabled", "the hybrid engine"),
    Gap("weight_quantization", "weight quantisation"),
    Gap("autotuning.enabled", "autotuning"),
)


def unsupported_problems(config: Config) -> list[Problem]:
    """A problem for every value in `config` that asks for what does not exist yet."""
    return [
        Problem(key, value, f"{gap.feature} is not available in this version", gap.cure)
        for gap in GAPS
        for key, value in _asked(config, gap)
    ]


def _asked(config: Config, gap: Gap) -> Iterator[tuple[str, Any]]:
    section: Section | None = config
    *parents, leaf = gap.key.split(".")
    for parent in parents:
        section = getattr(section, parent)
    if section is None:  # an optional section that is not there
        return
    names = {json_name(name, field): name for name, field in type(section).model_fields.items()}
    value = getattr(section, names[leaf])
    default = type(section).model_fields[names[leaf]].default
    if gap.asks is not None:
        if gap.asks(value):
            yield gap.key, value
    else:
        yield from _differences(gap.key, value, default)


def _differences(key: str, value: Any, default: Any) -> Iterator[tuple[str, Any]]:
    """The keys below (or at) `key` whose values are not the default, innermost ones."""
    if not (isinstance(value, Section) and isinstance(default, Section)):
        if value != default:
            yield key, value
        return
    for name, field in type(value).model_fields.items():
        original = field.get_default(call_default_factory=True)
        yield from _differences(f"{key}.{json_name(name, field)}", getattr(value, name), original)
