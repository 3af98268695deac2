"""Sections about how ranks share a model: `mesh` (polyaccel's own) and `tensor_parallel`."""

from __future__ import annotations

from typing import Literal

from polyaccel.config.section import CountInt, PositiveInt, Section


class MeshConfig(Section):
    """polyaccel's own section: how many ranks stand along each axis. Ranks fill the mesh with the last axis fastest:
    data, sequence, tensor."""

    data: PositiveInt | None = None
    """Ranks with batches of their own; null is as many as there are, divided by the other two."""
    sequence: PositiveInt = 1
    """Ranks that share the sequences of a batch; the same as `sequence_parallel_size`."""
    tensor: PositiveInt = 1
    """Ranks that share the weights of a layer; the same as `tensor_parallel.autotp_size`."""


class TensorParallelSizeConfig(Section):
    """DeepSpeed's section inside `tensor_parallel`."""

    tp_size: PositiveInt = 1
    """Another name of `tensor_parallel.autotp_size`."""


class TensorParallelConfig(Section):
    """Weights that are cut over ranks, layer by layer."""

    autotp_size: CountInt = 0
    """Ranks that share the weights of each layer, a divisor of all ranks; 0 and 1 cut nothing. Micro-batches are then
    those of each group of so many ranks."""
    tp: TensorParallelSizeConfig = TensorParallelSizeConfig()
    """The same number, where DeepSpeed's inference configs have it."""


class SequenceParallelConfig(Section):
    """polyaccel's own section: how attention is computed where `sequence_parallel_size` ranks share each sequence."""

    method: Literal["ulysses", "ring", "own"] = "ulysses"
    """`ulysses` exchanges heads for tokens, `ring` sends keys and values round; both cut the batches of a model of
    transformers by themselves. `own`: the model cuts its sequences itself."""
    core_attention: str = "blockwise"
    """The attention between Ulysses's exchanges: `blockwise`, whose memory grows with the length alone, or one of
    transformers' names: `eager`, `sdpa`, `flex_attention`."""
