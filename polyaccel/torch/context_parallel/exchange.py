"""Between ranks: from all heads of a rank's tokens to all tokens of a rank's heads and back, as autograd functions.

[Note: All-to-all message layout]
What rank i sends rank j are its tokens' vectors, token by token, (tokens of i, rows, heads of j x width), those of
queries, keys and values side by side: one call for all three. So what arrives, rank after rank, is the whole sequence
as (length, rows, ...) without another copy, and the way back sends parts of that tensor as they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyaccel.comm.base import Communicator
from polyaccel.torch.context_parallel.shares import Span

Cuts = Sequence[Sequence[Span]]
"""The heads of each tensor that each rank has, `cuts[tensor][rank]`; spans of neighbours may overlap."""


class _Exchange(NamedTuple):
    communicator: Communicator
    cuts: Cuts
    lengths: Sequence[int]


def all_to_all(
    communicator: Communicator, source: Tensor, sent: Sequence[int], received: Sequence[int], longest: int, label: str
) -> Tensor:
    """What the other ranks send this one, `received[i]` elements of rank i, for `sent[j]` of `source` to rank j; no
    rank sends another one more than `longest`."""
    out = torch.empty(sum(received), dtype=source.dtype, device=source.device)
    wrap = communicator.accelerator.wrap
    communicator.all_to_all(
        wrap(out), wrap(source), counts=received, source_counts=sent, max_send_numel=longest, label=label
    )
    return out


def _widths(cuts: Cuts, widths: Sequence[int], rank: int) -> list[int]:
    """Of each tensor: how many numbers of a token are those of `rank`'s heads."""
    return [(cut[rank][1] - cut[rank][0]) * width for cut, width in zip(cuts, widths, strict=True)]


def _by_head(part: Tensor, heads: int, width: int) -> Tensor:
    """`part`, whose last dim has heads side by side, with a dim of heads: a view."""
    return part.view(*part.shape[:-1], heads, width)


def _to_heads(exchange: _Exchange, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """All tokens of this rank's heads, (rows, heads of the rank, length, width), of `tensors` (rows, heads, tokens of
    the rank, width)."""
    communicator, cuts, lengths = exchange
    rank, ranks, rows = communicator.rank, communicator.world_size, len(tensors[0])
    widths = [tensor.shape[-1] for tensor in tensors]
    of_rank = [_widths(cuts, widths, other) for other in range(ranks)]
    own = lengths[rank]
    sent = [own * rows * sum(one) for one in of_rank]
    source = torch.empty(sum(sent), dtype=tensors[0].dtype, device=tensors[0].device)
    for part, numbers, other in zip(torch.split(source, sent), of_rank, range(ranks), strict=True):
        for place, tensor, cut in zip(
            torch.split(part.view(own, rows, sum(numbers)), numbers, -1), tensors, cuts, strict=True
        ):
            first, last = cut[other]
            if last > first:
                _by_head(place, last - first, tensor.shape[-1]).copy_(tensor[:, first:last].permute(2, 0, 1, 3))
    received = [length * rows * sum(of_rank[rank]) for length in lengths]
    longest = max(lengths) * rows * max(map(sum, of_rank))
    whole = all_to_all(communicator, source, sent, received, longest, "sequence to heads")
    parts = torch.split(whole.view(sum(lengths), rows, sum(of_rank[rank])), of_rank[rank], -1)
    return tuple(
        _by_head(part, cut[rank][1] - cut[rank][0], width).permute(1, 2, 0, 3)
        for part, cut, width in zip(parts, cuts, widths, strict=True)
    )


def _to_sequence(exchange: _Exchange, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """All heads of this rank's tokens, (rows, heads, tokens of the rank, width), of `tensors` (rows, heads of the rank,
    length, width). Where several ranks have a head, their numbers are added in rank order."""
    communicator, cuts, lengths = exchange
    rank, ranks, rows = communicator.rank, communicator.world_size, len(tensors[0])
    widths = [tensor.shape[-1] for tensor in tensors]
    of_rank = [_widths(cuts, widths, other) for other in range(ranks)]
    flat = [tensor.permute(2, 0, 1, 3).flatten(2) for tensor in tensors]
    source = (flat[0].contiguous() if len(flat) == 1 else torch.cat(flat, -1)).view(-1)
    sent = [length * rows * sum(of_rank[rank]) for length in lengths]
    own = lengths[rank]
    received = [own * rows * sum(one) for one in of_rank]
    longest = max(lengths) * rows * max(map(sum, of_rank))
    arrived = all_to_all(communicator, source, sent, received, longest, "heads to sequence")
    results = []
    for cut, width in zip(cuts, widths, strict=True):
        heads = max(last for _, last in cut)
        make = torch.zeros if sum(last - first for first, last in cut) != heads else torch.empty
        results.append(make((rows, own, heads, width), dtype=source.dtype, device=source.device).transpose(1, 2))
    for part, numbers, other in zip(torch.split(arrived, received), of_rank, range(ranks), strict=True):
        for place, result, cut in zip(
            torch.split(part.view(own, rows, sum(numbers)), numbers, -1), results, cuts, strict=True
        ):
            first, last = cut[other]
            if last > first:
                heads_of_other = _by_head(place, last - first, result.shape[-1]).permute(1, 2, 0, 3)
                target = result[:, first:last]
                if sum(min(last, two) > max(first, one) for one, two in cut) == 1:
                    target.copy_(heads_of_other)
                else:
                    target.add_(heads_of_other)
    return tuple(results)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return _to_heads(exchange, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_to_sequence(ctx.exchange, grads)


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, tensor: Tensor) -> Tensor:
        ctx.exchange = exchange
        out = _to_sequence(exchange, [tensor])[0].transpose(1, 2)
        return torch.ops.aten._unsafe_view.default(out, out.shape)  # type: ignore[no-any-return] # as in `changeable`

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_to_heads(ctx.exchange, [grad.transpose(1, 2)])


def sequence_to_heads(
    communicator: Communicator, cuts: Cuts, lengths: Sequence[int], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """All tokens of some heads for some tokens of all heads: `tensors`, (rows, heads, `lengths[rank]`, width), become
    (rows, heads of `cuts[tensor][rank]`, sum of lengths, width). Gradients of heads that several ranks get are summed.
    """
    if communicator.world_size == 1:
        return tensors
    out: tuple[Tensor, ...] = _ToHeads.apply(_Exchange(communicator, cuts, lengths), *tensors)  # type: ignore[no-untyped-call]
    return out


def heads_to_sequence(
    communicator: Communicator, heads: Sequence[Span], lengths: Sequence[int], tensor: Tensor
) -> Tensor:
    """The way back: `tensor`, (rows, heads of `heads[rank]`, sum of lengths, width), becomes (rows, all heads,
    `lengths[rank]`, width). Each head is one rank's."""
    if communicator.world_size == 1:
        return tensor
    out: Tensor = _ToSequence.apply(_Exchange(communicator, [heads], lengths), tensor)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2)


def gather_tokens(communicator: Communicator, tensor: Tensor, lengths: Sequence[int]) -> Tensor:
    """Every rank's `tensor` (rows, `lengths[rank]`, ...), side by side: (rows, sum of lengths, ...). No gradient."""
    own = tensor.detach().transpose(0, 1).contiguous()
    if communicator.world_size == 1:
        return tensor.detach()
    is_bool = own.dtype == torch.bool
    source = own.view(torch.uint8) if is_bool else own
    numbers = prod(source.shape[1:])
    out = torch.empty(sum(lengths) * numbers, dtype=source.dtype, device=source.device)
    wrap = communicator.accelerator.wrap
    counts = [length * numbers for length in lengths]
    communicator.all_gather(wrap(out), wrap(source.view(-1)), counts=counts, label="tokens")
    whole = out.view(sum(lengths), *source.shape[1:]).transpose(0, 1)
    return whole.view(torch.bool) if is_bool else whole
