"""What goes between replicated and cut tensors, as autograd functions.

[Note: Replicated and split tensors]
A *replicated* tensor is the same on all ranks, and so is its gradient: each rank has the whole one, as if it were
alone. A *part* is a rank's own piece of a tensor along one dimension, and its gradient is the same piece of the
gradient. What every rank uses for its own computations is *shared*: its gradient is the sum of what the ranks find.
Each function says which of the three it takes and gives, and its gradient goes the other way. (Megatron's f and g are
`to_shared` and `summed`: Shoeybi et al., 2019; along the sequence: Korthikanti et al., 2022.)

The gradients of all but `summed_` have gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from polyaccel.torch.graph_breaks import outside_graphs
from polyaccel.torch.sharding.tensor_shard import scale_gradient
from polyaccel.torch.tensor_parallel.ranks import TensorRanks


@outside_graphs
def to_shared(x: Tensor, ranks: TensorRanks) -> Tensor:
    """The replicated `x`, for what every rank computes by itself; its gradient is added up over the ranks."""
    if ranks.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _ToShared.apply(x, ranks)  # type: ignore[no-untyped-call, no-any-return]


@outside_graphs
def summed(x: Tensor, ranks: TensorRanks) -> Tensor:
    """The replicated sum of the ranks' `x`."""
    return x if ranks.size == 1 else _Summed.apply(x, ranks)  # type: ignore[no-untyped-call]


@outside_graphs
def summed_(x: Tensor, ranks: TensorRanks) -> Tensor:
    """`summed` in the contiguous memory of `x`, which no other operation may need."""
    return x if ranks.size == 1 else _SummedInPlace.apply(x, ranks)  # type: ignore[no-untyped-call]


@outside_graphs
def part_of(x: Tensor, ranks: TensorRanks, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part of the replicated `x` along `dim`, where rank r's has `sizes[r]` elements."""
    return _PartOf.apply(x, ranks, dim, tuple(sizes))  # type: ignore[no-untyped-call, no-any-return]


@outside_graphs
def gathered(x: Tensor, ranks: TensorRanks, dim: int, sizes: Sequence[int]) -> Tensor:
    """All ranks' parts, replicated."""
    return _Gathered.apply(x, ranks, dim, tuple(sizes))  # type: ignore[no-untyped-call, no-any-return]


@outside_graphs
def gathered_shared(x: Tensor, ranks: TensorRanks, dim: int, sizes: Sequence[int]) -> Tensor:
    """All-gather for replicated computation; gradients are reduce-scattered (sequence parallelism)."""
    return _GatheredShared.apply(x, ranks, dim, tuple(sizes))  # type: ignore[no-untyped-call, no-any-return]


@outside_graphs
def summed_part(x: Tensor, ranks: TensorRanks, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part of the sum of the ranks' `x`: what leaves a row layer under Megatron's sequence parallelism."""
    return _SummedPart.apply(x, ranks, dim, tuple(sizes))  # type: ignore[no-untyped-call, no-any-return]


@outside_graphs
def shared_weight(weight: Tensor, ranks: TensorRanks) -> Tensor:
    """Scale a whole weight's gradient by ranks; the engine takes means. See [Note: Gradient means over ranks]."""
    if ranks.size == 1 or not (torch.is_grad_enabled() and weight.requires_grad):
        return weight
    return scale_gradient(weight, ranks.size)


class _ToShared(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.ranks), None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return to_shared(grad, ctx.ranks), None


class _SummedInPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.mark_dirty(x)
        return ranks.sum(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Along(Function):
    """What is done along a dimension: `dim` and the ranks' `sizes` there."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.ranks, ctx.dim, ctx.sizes = inputs


class _PartOf(_Along):
    @staticmethod
    def forward(x: Tensor, ranks: TensorRanks, dim: int, sizes: tuple[int, ...]) -> Tensor:
        return ranks.part(x, dim, sizes).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return gathered(grad, ctx.ranks, ctx.dim, ctx.sizes), None, None, None


class _Gathered(_Along):
    @staticmethod
    def forward(x: Tensor, ranks: TensorRanks, dim: int, sizes: tuple[int, ...]) -> Tensor:
        return ranks.gathered(x, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return part_of(grad, ctx.ranks, ctx.dim, ctx.sizes), None, None, None


class _GatheredShared(_Along):
    @staticmethod
    def forward(x: Tensor, ranks: TensorRanks, dim: int, sizes: tuple[int, ...]) -> Tensor:
        return ranks.gathered(x, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return summed_part(grad, ctx.ranks, ctx.dim, ctx.sizes), None, None, None


class _SummedPart(_Along):
    @staticmethod
    def forward(x: Tensor, ranks: TensorRanks, dim: int, sizes: tuple[int, ...]) -> Tensor:
        return ranks.summed_part(x, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return gathered_shared(grad, ctx.ranks, ctx.dim, ctx.sizes), None, None, None
