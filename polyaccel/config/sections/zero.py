"""The section `zero_optimization`: what is sharded over the ranks, and how the traffic for it is cut."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from polyaccel.config.section import CountInt, Listed, PositiveInt, Section, Stage
from polyaccel.config.sections.offload import OffloadOptimizerConfig, OffloadParamConfig

UNBOUNDED = 2**63 - 1


class LeafModuleConfig(Section):
    """Modules whose parameters stage 3 gathers together."""

    classes: Listed[tuple[str, ...]] = (
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
    """Classes, by qualified name (`package.module.Class`) or by the class's name alone."""
    names: Listed[tuple[str, ...]] = ()
    """Modules, by full name in the model, for example `model.layers.0.mlp`."""
    name_suffixes: Listed[tuple[str, ...]] = ()
    """Modules, by the end of their full name, for example `mlp`."""


class LoCoConfig(Section):
    """Errors of quantised gradients that are added to the next ones (LoCo, Xie et al. 2024)."""

    err_beta: Annotated[float, Field(ge=0, lt=1)] = 0.8
    """What is kept of an error in a reduction; the rest is what this reduction leaves out."""
    reset_T: PositiveInt = 1024  # noqa: N815 - DeepSpeed's spelling
    """Reductions of a bucket after which its errors begin at zero."""


class ZeroConfig(Section):
    """ZeRO (Rajbhandari et al. 2020). Sizes count elements, not bytes."""

    stage: Stage[Literal[0, 1, 2, 3]] = 0
    """0 replicates everything; 1 shards optimizer states over the ranks, 2 gradients as well, 3 parameters as well.
    Stages 0 to 2 send the same; stage 3 sends half as much again, for it gathers parameters for forward and backward.
    `polyaccel plan` prints the memory of each."""
    reduce_bucket_size: PositiveInt = 500_000_000
    """The most elements that travel in one collective; a larger parameter has a bucket to itself. Buckets of a small
    model are smaller: a sixteenth of it, or 4 Mi elements. Larger ones need more memory for gradients under way. "auto"
    is the square of the hint `hidden_size`, as in Hugging Face."""
    allgather_bucket_size: PositiveInt = 500_000_000
    """Parameters are gathered in the very buckets in which gradients are reduced, so this has no effect. That is logged
    where it is neither `reduce_bucket_size` nor the default."""
    overlap_comm: bool | None = None
    """Reduce gradients while backward continues, which needs memory for the buckets under way. Null is true at every
    stage: the numbers are the same either way."""
    overlap_param_gather: bool = False
    """polyaccel's own: gather the updated parameters during the next forward pass instead of at the end of `step`, so
    that computing hides it. The numbers are the same."""
    ignore_unused_parameters: bool = True
    """Parameters without a gradient count as zero gradients; false makes them an error."""
    parameter_alignment: bool = False
    """Start parameters on 16-byte boundaries. They always start on 64-byte boundaries, so both values have the same
    effect."""
    compute_grad_norm: bool = True
    """Compute the gradients' norm in each step, which reads every gradient once. False needs `gradient_clipping` 0, and
    metrics then have no norm."""

    offload_param: OffloadParamConfig = OffloadParamConfig()
    """Stage 3: where each rank's shard of the parameters rests while nothing computes with it."""
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    """Where optimizer states and master weights live, and are updated."""

    prefetch_bucket_size: CountInt = Field(50_000_000, alias="stage3_prefetch_bucket_size")
    """Stage 3: the most elements gathered ahead of their use, on top of those in use. Where it is left out, at most one
    unit of a small model. More hides slower networks and needs more memory."""
    param_persistence_threshold: CountInt = Field(100_000, alias="stage3_param_persistence_threshold")
    """Stage 3: parameters of at most this many elements stay whole on every rank, which saves their collectives and
    costs their memory."""
    model_persistence_threshold: CountInt = Field(UNBOUNDED, alias="stage3_model_persistence_threshold")
    """Stage 3: the most elements that stay whole by `stage3_param_persistence_threshold`, smallest parameters
    first."""
    max_live_parameters: CountInt = Field(1_000_000_000, alias="stage3_max_live_parameters")
    """Stage 3: the most elements gathered at any time, except where one unit alone has more. Where it is left out, at
    most three units of a small model."""
    max_reuse_distance: CountInt = Field(1_000_000_000, alias="stage3_max_reuse_distance")
    """Stage 3: keep a parameter gathered after its use when it is needed again before this many elements of others
    are used. Where it is left out, at most one unit of a small model."""
    gather_16bit_weights_on_model_save: bool = Field(False, alias="stage3_gather_16bit_weights_on_model_save")
    """`save_16bit_model` gathers the weights at every stage whatever this sets, bucket by bucket, so nothing is ever
    silently not saved."""
    module_granularity_threshold: CountInt = Field(0, alias="stage3_module_granularity_threshold")
    """Stage 3: make leaf modules of the outermost modules that are this fine or finer: those with at most so many
    elements for each module with parameters that they consist of, themselves included. 0 is off."""
    leaf_module: LeafModuleConfig = LeafModuleConfig()
    """Stage 3: modules whose parameters are gathered together, wherever they stand. A choice that is stated and matches
    no module is an error."""
    memory_efficient_linear: bool = True
    """Stage 3: do not keep gathered weights for the backward. None is ever kept, and `F.linear` is never replaced, so
    both values have the same effect."""
    override_module_apply: bool = True
    """Let `Module.apply` see whole parameters inside `zero.Init`. They are whole there, so it is never replaced, and
    both values have the same effect; after `initialize` a function that needs values has to use
    `zero.GatheredParameters`."""
    log_trace_cache_warnings: bool = False
    """Stage 3: warn in every step whose order of modules is another one than before; otherwise that is logged once, as
    information."""
    fixed_order: bool = Field(False, alias="stage3_fixed_order")
    """polyaccel's own. Stage 3: all ranks use the same parameters in the same order in each step, as models do that do
    not branch on their data. After the third step ranks no longer wait for each other at the end of forward and of
    backward. A rank that needs anything else ends the job with an error."""
    enable_sanity_checks: bool = False
    """Stage 3: `zero.GatheredParameters` compares values when it is left, and so finds changes that version counters do
    not show (those through `.data`)."""

    zero_hpz_partition_size: PositiveInt = 1
    """Stage 3, ZeRO++ hpZ: so many neighbouring ranks keep what was gathered first in a step among them, and gather it
    from each other from then on. Must divide the number of ranks; the ranks of a host are a good choice. The numbers
    are those of 1, which is off."""
    zero_quantized_weights: bool = False
    """Stage 3, ZeRO++ qwZ: gather parameters for forward and backward as 8-bit integers, with a scale for every 256.
    Persistent parameters and whatever a user sees or saves stay exact."""
    zero_quantized_nontrainable_weights: bool = False
    """Stage 3, ZeRO++: gather frozen parameters as 8-bit integers (`zero_quantized_weights` does so too). Each rank's
    slice stays as it is, so checkpoints lose nothing and memory is not saved."""
    zeropp_loco_param: LoCoConfig | None = None
    """Add what `zero_quantized_gradients` leaves out of gradients to the next ones (LoCo); null does not."""
    zero_quantized_gradients: bool = False
    """Stage 3, ZeRO++ qgZ: send gradients as 4-bit integers, with a scale for every 256, and add them in float32. Also
    on a single host, where DeepSpeed does not."""
