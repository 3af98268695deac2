"""Sections about other forms of parallelism and about rewriting the model; none of them exists yet."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from polyaccel.config.section import CountInt, Int, Listed, Params, PositiveInt, Section


class PipelineConfig(Section):
    """Pipeline parallelism."""

    stages: PositiveInt | Literal["auto"] = "auto"
    """Stages of the pipeline; "auto" asks the module."""
    partition: str = "best"
    """How layers are dealt to stages."""
    seed_layers: bool = False
    """Seed each layer by its index."""
    activation_checkpoint_interval: CountInt = 0
    """Layers between two activation checkpoints; 0 is none."""
    pipe_partitioned: bool = True
    """Shard the activations sent between stages over the model-parallel ranks."""
    grad_partitioned: bool = True
    """Shard the gradients sent between stages likewise."""
    use_reentrant: bool = True
    """Use torch's reentrant checkpointing."""


class CompileConfig(Section):
    """DeepCompile: communication inserted by the compiler."""

    deepcompile: bool = False
    """Use it."""
    free_activation: bool = False
    """Free activations early."""
    offload_activation: bool = False
    """Move activations to the host."""
    offload_opt_states: bool = False
    """Move optimizer states to the host."""
    offload_parameters: bool = False
    """Move parameters to the host."""
    double_buffer: bool = False
    """Use two buffers in reductions."""
    symmetric_memory: bool = False
    """Use symmetric memory for gathers."""
    debug_log: bool = False
    """Log what the passes do."""
    sync_before_reduce: bool = False
    """Wait for the device before reductions."""
    sync_after_reduce: bool = False
    """Wait for the device after reductions."""
    sync_before_allgather: bool = False
    """Wait for the device before gathers."""
    sync_after_allgather: bool = False
    """Wait for the device after gathers."""
    autoep_non_moe: bool = False
    """Compile the rest of a model whose experts are parallel."""
    passes: Listed[tuple[str, ...]] | None = None
    """Compiler passes to run: z1, z3, autosp, autotp."""


class TpConfig(Section):
    """Degree of tensor parallelism."""

    tp_size: PositiveInt = 1
    """Ranks that share a tensor."""
    tp_grain_size: PositiveInt = 1
    """Smallest unit in which a tensor is cut."""


class LayerSpec(Section):
    """How layers whose names match are cut."""

    patterns: Listed[tuple[str, ...]]
    """Regular expressions of parameter names."""
    partition_type: Literal["row", "column", "skip"] = "column"
    """Which way the weight is cut."""
    shape: Listed[tuple[Any, ...]] | None = None
    """Sub-parameters of a fused weight."""
    partition_dim: Int | None = None
    """The tensor dim that is cut."""


class PartitionConfig(Section):
    """Rules for cutting layers."""

    use_default_specs: bool = True
    """Add DeepSpeed's own rules."""
    layer_specs: Listed[tuple[LayerSpec, ...]] = ()
    """Rules, first match wins."""


class TensorParallelConfig(Section):
    """Tensor parallelism."""

    autotp_size: CountInt = 0
    """Ranks that share a tensor; 0 is off."""
    dtype: str = "fp16"
    """Element type of the sharded weights."""
    tp_overlap_comm: bool = False
    """Overlap its collectives."""
    vocab_parallel_lm_head: bool | None = None
    """Shard the output layer by vocabulary."""
    vocab_parallel_ce_backend: Literal["torch", "liger"] = "torch"
    """Cross entropy over a sharded vocabulary."""
    tp: TpConfig = TpConfig()
    """Degree."""
    partition_config: PartitionConfig | None = None
    """Rules for cutting layers."""
    preset_model: Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None = None
    """Rules for a known model."""
    keep_module_on_host: bool = False
    """Leave the module in host memory."""
    injection_policy_tuple: Listed[tuple[Any, ...]] | None = None
    """DeepSpeed's injection policy."""


class ExpertParallelConfig(Section):
    """Experts over ranks."""

    enabled: bool = False
    """Use it."""
    autoep_size: PositiveInt = 1
    """Ranks that share the experts."""
    expert_tensor_parallel_size: PositiveInt = 1
    """Ranks that share one expert."""
    preset_model: str | None = None
    """Rules for a known model."""
    patterns: Params | None = None
    """Names of the parts of an unknown one."""
    use_grouped_mm: bool = True
    """Multiply all experts in one grouped product."""
    comm_backend: str = "comm"
    """Who carries tokens to experts."""


class HybridEngineConfig(Section):
    """Training and generation with the same weights."""

    enabled: bool = False
    """Use it."""
    max_out_tokens: PositiveInt = 512
    """Tokens of prompt and answer."""
    inference_tp_size: PositiveInt = 1
    """Ranks that share a tensor while generating."""
    release_inference_cache: bool = False
    """Free the cache after generating."""
    pin_parameters: bool = True
    """Keep inference weights in page-locked memory."""
    tp_gather_partition_size: PositiveInt = 8
    """Layers gathered at a time."""
    enable_cuda_graph: bool = False
    """Replay generation as a graph."""


class WeightQuantizationConfig(Section):
    """Weights as small integers for inference."""

    quantized_initialization: Params = Field(default_factory=dict, validate_default=True)
    """Quantise while the model is built."""
    post_init_quant: Params = Field(default_factory=dict, validate_default=True)
    """Quantise a built model, by pattern."""
