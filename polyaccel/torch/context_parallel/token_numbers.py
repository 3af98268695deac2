"""Outputs with a number for each token, whole on every rank: `whole_token_numbers`.

[Note: Numbers of tokens]
Some models give a number for each token next to their loss, or in place of logits (log-probabilities, entropies,
values), and their scripts compute a loss of these. A rank's part would be a loss of its tokens alone, whose gradient,
as the mean over N ranks, is an N-th of the right one. So every rank gets these outputs whole. It then computes the loss
of the whole sequence, and the gradient of its own part is taken N times, for the engine's mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyaccel.comm.base import Communicator
from polyaccel.torch.context_parallel.shares import TokenShares


class _Whole(torch.autograd.Function):
    """This rank's columns in, those of all ranks out; exact, for every other rank adds zeros."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shares: TokenShares, communicator: Communicator) -> Tensor:
        ctx.shares, ctx.communicator = shares, communicator
        given = own.detach().to(torch.uint8) if own.dtype is torch.bool else own.detach()
        whole = given.new_zeros(own.shape[0], shares.total)
        start = 0
        for first, end in shares.spans[communicator.rank]:
            whole[:, first:end] = given[:, start : start + end - first]
            start += end - first
        communicator.all_reduce(communicator.accelerator.wrap(whole), label="numbers of tokens")
        whole = whole.to(own.dtype)
        if not own.is_floating_point():
            ctx.mark_non_differentiable(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        spans = ctx.shares.spans[ctx.communicator.rank]
        own = torch.cat([grad[:, first:end] for first, end in spans], 1)
        return own * ctx.communicator.world_size, None, None


def whole_token_numbers(outputs: Any, shares: TokenShares, rows: int, communicator: Communicator) -> Any:
    """`outputs` of a model with each (rows, own tokens) of its tensors made (rows, tokens of all ranks).

    See [Note: Numbers of tokens]. Collective, where there is such a tensor on any rank.
    """
    if not isinstance(outputs, Mapping):
        return outputs
    names = [name for name, one in outputs.items() if _may_be_tokens(one, rows)]
    if not names:
        return outputs
    own = shares.lengths[communicator.rank]
    device = outputs[names[0]].device
    fits = torch.tensor([int(outputs[name].shape[1] == own) for name in names], dtype=torch.int32, device=device)
    communicator.all_reduce(communicator.accelerator.wrap(fits), label="numbers of tokens")
    wholes = {
        name: _Whole.apply(outputs[name], shares, communicator)  # type: ignore[no-untyped-call]
        for name, count in zip(names, fits.tolist(), strict=True)
        if count == communicator.world_size
    }
    return type(outputs)(**{**outputs, **wholes})


def _may_be_tokens(output: Any, rows: int) -> bool:
    return isinstance(output, Tensor) and output.dim() == 2 and output.shape[0] == rows
