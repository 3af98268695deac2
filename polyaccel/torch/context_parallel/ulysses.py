"""Ulysses: each rank has some tokens of all heads, but computes attention of all tokens for some heads.

Before attention an all-to-all brings the tokens of a rank's heads together, and after it another one brings the heads
of a rank's tokens back (Jacobs and others, "DeepSpeed Ulysses", 2023). For N ranks each one sends (N-1)/N of its
queries, keys, values and outputs: of a sequence of s tokens with hidden size h 4 s h (N-1) / N^2 numbers a layer, where
gathering keys and values would be 2 s h (N-1) / N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.comm.base import Communicator
from polyaccel.errors import ShardingError
from polyaccel.torch.context_parallel.block_mask import AttentionRule, DocumentMask
from polyaccel.torch.context_parallel.exchange import heads_to_sequence, sequence_to_heads
from polyaccel.torch.context_parallel.local import local_attention, promoted
from polyaccel.torch.context_parallel.shares import HeadShares, TokenShares

LocalAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values (rows, heads, length, width), equally many query heads to a key head, to the output."""


def exchanged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    communicator: Communicator,
    lengths: Sequence[int],
    compute: LocalAttention,
) -> Tensor:
    """`compute` on the whole sequence for this rank's heads, between the two exchanges. Queries, keys and values are
    (rows, heads, tokens of the rank, width), and so is the result."""
    rank, ranks = communicator.rank, communicator.world_size
    heads = HeadShares.from_counts(q.shape[1], k.shape[1], ranks)
    if k.shape[1] != v.shape[1]:
        raise ShardingError(f"{k.shape[1]} key heads and {v.shape[1]} value heads", hint="give as many of both")
    if q.shape[2] != lengths[rank] or k.shape[2] != lengths[rank]:
        raise ShardingError(
            f"rank {rank} has {q.shape[2]} queries and {k.shape[2]} keys, and {lengths[rank]} tokens by its shares",
            hint="give every rank's number of tokens in rank order",
            value=tuple(lengths),
        )
    q, k, v = sequence_to_heads(communicator, (heads.query, heads.key, heads.key), lengths, *promoted(q, k, v))
    places = heads.key_of_query(rank)
    if places is not None:
        k, v = _heads_at(places, k), _heads_at(places, v)
    out = compute(q, k, v) if q.shape[1] else v  # without heads it is as empty as the values are, and has their graph
    return heads_to_sequence(communicator, heads.query, lengths, out)


def _heads_at(places: Sequence[int], values: Tensor) -> Tensor:
    """The heads at `places`. An index of them would be copied to the device, for which the host waits."""
    heads = values.unbind(1)
    return torch.stack([heads[place] for place in places], 1)


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    communicator: Communicator,
    *,
    rule: AttentionRule,
    marks: DocumentMask,
    shares: TokenShares,
    scale: float | None = None,
) -> Tensor:
    """Attention of a sequence that is cut over the ranks of `communicator` by `shares`, which must be contiguous.

    Queries, keys and values are (rows, heads, tokens of the rank, width); there may be fewer key heads than query
    heads, and more ranks than heads. The result is as the queries, with the width of the values.
    """
    if not shares.is_contiguous:
        raise ShardingError("Ulysses needs the ranks' tokens in order", hint="use TokenShares.contiguous")

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return local_attention(q, k, v, rule=rule, marks=marks, scale=scale)

    return exchanged_attention(q, k, v, communicator, shares.lengths, compute)


class DistributedAttention(nn.Module):
    """Any attention of whole sequences, as attention of sequences that are cut over the ranks of `communicator`.

    `local_attention(query, key, value, *args, **named)` gets tensors of four dims as this module does, but with all
    tokens along dim `gather_idx` and this rank's heads along dim `scatter_idx`, and returns the like. The last dim is a
    head's width. Heads need not divide, and key heads may be fewer. `lengths` are the ranks' numbers of tokens, where
    they differ.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        communicator: Communicator,
        scatter_idx: int = 2,
        gather_idx: int = 0,
    ) -> None:
        super().__init__()
        if scatter_idx == gather_idx or {scatter_idx, gather_idx} - {0, 1, 2}:
            raise ShardingError(
                f"scatter_idx {scatter_idx} and gather_idx {gather_idx} are not two of the dims 0, 1 and 2",
                hint="scatter_idx is the dim of heads, gather_idx that of tokens",
                value=(scatter_idx, gather_idx),
            )
        self.local_attention = local_attention
        self.communicator = communicator
        rows = ({0, 1, 2} - {scatter_idx, gather_idx}).pop()
        self._order = rows, scatter_idx, gather_idx, 3
        self._back = tuple(self._order.index(dim) for dim in range(4))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        lengths: Sequence[int] | None = None,
        **named: Any,
    ) -> Tensor:
        for tensor in (query, key, value):
            if tensor.dim() != 4:
                raise ShardingError(
                    f"a tensor of shape {tuple(tensor.shape)} has no dims of rows, tokens, heads and width",
                    hint="give queries, keys and values of four dims",
                    value=tuple(tensor.shape),
                )
        q, k, v = (tensor.permute(self._order) for tensor in (query, key, value))
        found = lengths or [q.shape[2]] * self.communicator.world_size

        def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            back = (one.permute(self._back) for one in (q, k, v))
            return self.local_attention(*back, *args, **named).permute(self._order)

        return exchanged_attention(q, k, v, self.communicator, found, compute).permute(self._back)
