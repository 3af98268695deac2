"""`deepspeed.moe.mappings`: tokens that tensor ranks share, gathered and dropped again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from polyaccel.errors import ShardingError
from polyaccel_deepspeed.engine import groups


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Return the tokens of all tensor ranks along `dim`, in their order. Its gradient is that of `drop_tokens`."""
    if groups.get_tensor_model_parallel_world_size() == 1:
        return input_
    gathered: Tensor = _Gather.apply(input_, dim)  # type: ignore[no-untyped-call]
    return gathered


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Return this tensor rank's part of tokens along `dim`. Its gradient is that of `gather_tokens`.

    Raises ShardingError if the ranks cannot share them evenly.
    """
    ranks = groups.get_tensor_model_parallel_world_size()
    if ranks == 1:
        return input_
    if input_.shape[dim] % ranks:
        raise ShardingError(
            f"{ranks} tensor ranks cannot share {input_.shape[dim]} tokens evenly", value=input_.shape[dim]
        )
    dropped: Tensor = _Drop.apply(input_, dim)  # type: ignore[no-untyped-call]
    return dropped


def _gathered(tokens: Tensor, dim: int) -> Tensor:
    parts = [torch.empty_like(tokens) for _ in range(groups.get_tensor_model_parallel_world_size())]
    dist.all_gather(parts, tokens.contiguous(), group=groups.get_tensor_model_parallel_group())
    return torch.cat(parts, dim)


def _dropped(tokens: Tensor, dim: int) -> Tensor:
    ranks, rank = groups.get_tensor_model_parallel_world_size(), groups.get_tensor_model_parallel_rank()
    return tokens.chunk(ranks, dim)[rank].contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return _gathered(tokens, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _dropped(gradient, ctx.dim), None


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return _dropped(tokens, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.dim), None
