"""Sections about how ranks share a model: `mesh` (polyaccel's own) and `tensor_parallel`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from polyaccel.config.section import CountInt, Int, Listed, PositiveFloat, PositiveInt, Section


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class MeshConfig(Section):
    """polyaccel's own section: how many ranks stand along each axis. Ranks fill the mesh with the last axis fastest:
    pipe, data, expert, sequence, tensor. DeepSpeed's keys for these sizes are other spellings of them."""

    pipe: PositiveInt = 1
    """Stages of a pipeline, a divisor of all ranks; also spelled `pipeline.stages`. A model that sets its own number
    must have the same one, or this is left out."""
    data: PositiveInt | None = None
    """Ranks with their own batches: training on any other number is an error. Null is as many as there are, divided by
    the others. Also spelled `data_parallel_size`."""
    expert: PositiveInt = 1
    """Ranks that share the experts of each layer, a divisor of the ranks with their own batches; also spelled
    `expert_parallel.autoep_size`. Experts need not divide: the first ranks have one more."""
    sequence: PositiveInt = 1
    """Ranks that share the sequences of a batch, a divisor of all ranks; also spelled `sequence_parallel_size`."""
    tensor: PositiveInt = 1
    """Ranks that share the weights of each layer, a divisor of all ranks; 1 cuts nothing. Micro-batches are then those
    of each group of so many ranks. Also spelled `tensor_parallel.autotp_size` and `tensor_parallel.tp.tp_size`."""
    capacity: Listed[tuple[PositiveFloat, ...]] | None = None
    """How much of gradients, masters and states each rank has at stages 1 to 3, in proportion: `[1, 0.5]` gives the
    second of two ranks half of what the first has. One number for each rank; null: equal parts. Refused with ZeRO++,
    pipelines and native execution of JAX."""


class TensorParallelSizeConfig(Section):
    """DeepSpeed's section inside `tensor_parallel`."""

    tp_size: PositiveInt = 1
    """Another spelling of `mesh.tensor`."""


class LayerSpecConfig(Section):
    """How layers are cut whose weights' names match."""

    patterns: Listed[tuple[str, ...]]
    """Regular expressions, matched with the beginning of a weight's name."""
    partition_type: Literal["column", "row", "skip"] = "column"
    """By outputs, by inputs, or not at all."""
    shape: Annotated[tuple[int | tuple[int, ...], ...] | None, BeforeValidator(_tuples)] = None
    """The parts of a fused layer's dimensions, each of which is cut: `[3, -1]` is three equal ones,
    `[[64, 16, 16], -1]` queries, keys and values."""
    partition_dim: Int | None = None
    """The dimension of `shape` that has the parts; null is the one that is cut."""
    gather_output: bool = False
    """Gather the outputs of a layer that is cut by outputs, so that every rank has all of them."""
    grad_allreduce: bool = False
    """With "skip": the layer computes on a part of its inputs on each rank, for example a norm of heads, so the
    gradients of its weights are summed over the ranks."""


class PartitionConfig(Section):
    """Layers that are cut by the user's plan."""

    use_default_specs: bool = False
    """Cut the layers that no pattern matches by the model's own plan, or by its structure."""
    layer_specs: Listed[tuple[LayerSpecConfig, ...]] = ()
    """What is cut, and how: the first pattern that matches decides."""


class TensorParallelConfig(Section):
    """Weights that are cut over ranks, layer by layer."""

    autotp_size: CountInt = 0
    """DeepSpeed's spelling of `mesh.tensor`; 0 cuts nothing either."""
    tp: TensorParallelSizeConfig = TensorParallelSizeConfig()
    """The same number, where DeepSpeed's inference configs have it."""
    partition_config: PartitionConfig | None = None
    """Layers of models without a known plan; null cuts by the model's own plan, or else by its structure."""
    preset_model: Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None = None
    """For configs that were written for DeepSpeed: what is cut is read from the model itself."""
    vocab_parallel_lm_head: bool | None = None
    """Leave logits cut over the ranks and compute a causal loss so: `outputs.logits` are those of this rank's words."""
    sequence_sharded: bool = False
    """polyaccel's own: between attention and feed-forward layers each of the ranks has some of the tokens, so that
    norms, dropouts and what is kept of them are not whole on every rank."""


class SequenceParallelConfig(Section):
    """polyaccel's own section: how attention is computed where `mesh.sequence` ranks share each sequence."""

    method: Literal["ulysses", "ring", "tokenwise", "manual"] = "ulysses"
    """`ulysses` exchanges heads for tokens, `ring` sends keys and values round; both cut the batches of a model of
    transformers by themselves. `tokenwise` computes feed-forward layers of a rank's tokens alone, and whatever mixes
    tokens whole on every rank: for models that the others refuse. `manual`: the model cuts its sequences itself."""
    core_attention: str = "blockwise"
    """The attention between Ulysses's exchanges: `blockwise`, whose memory grows with the length alone, or one of
    transformers' names: `eager`, `sdpa`, `flex_attention`."""


class ExpertParallelConfig(Section):
    """The experts of a mixture over ranks with their own batches: tokens are dispatched to their experts and
    combined."""

    enabled: bool = False
    """Whether `autoep_size` counts."""
    autoep_size: PositiveInt = 1
    """DeepSpeed's spelling of `mesh.expert`."""
    log_load: bool = False
    """polyaccel's own: `engine.metrics.experts` and monitors show how each step's tokens went to the experts of each
    layer, with shared experts or without, for one small exchange a step."""
