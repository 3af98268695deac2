"""Ring attention: keys and values go round the ranks, and each rank's queries attend to all of them in turn (Liu and
others, "Ring Attention with Blockwise Transformers", 2023).

In every turn a rank sends the keys and values that it has on to the next rank, and computes with them meanwhile.
Outputs are merged exactly ([Note: Log-sum-exp merge]). The backward pass goes round again, and gradients of keys and
values travel behind them, so that after the last turn they are one rank away from home. Each rank sends N-1 times its
keys and values forward, and backward the same, and as often their gradients, in float32 at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyaccel.comm.base import Communicator, message_from, message_to
from polyaccel.comm.work import DONE, Work
from polyaccel.errors import ShardingError
from polyaccel.torch.context_parallel.block_mask import AttentionRule, DocumentMask
from polyaccel.torch.context_parallel.kernels import AttentionKernel, kernel_for
from polyaccel.torch.context_parallel.local import (
    OnlineSoftmax,
    Plan,
    Saved,
    backward_pieces,
    default_scale,
    forward_pieces,
    plan_of,
    promoted,
    require_rows,
    widened,
    zeros_for_gradients,
)
from polyaccel.torch.context_parallel.shares import TokenShares


def ring_plans(
    marks: DocumentMask, rule: AttentionRule, shares: TokenShares, rank: int, kernel: AttentionKernel
) -> tuple[Plan, ...]:
    """The plan of `rank`'s queries with the keys of each rank."""
    return tuple(plan_of(marks, rule, shares.spans[rank], keys, kernel) for keys in shares.spans)


class _Passing:
    """Two tensors of one shape that go round the ring: each rank's in turn, as they arrive from the rank before."""

    def __init__(self, communicator: Communicator, lengths: Sequence[int], shape: Sequence[int], like: Tensor) -> None:
        self._communicator = communicator
        self._lengths = lengths
        self._rows, self._heads, _, self._width = shape
        self._like = like

    def split_pair(self, buffer: Tensor, owner: int) -> tuple[Tensor, Tensor]:
        """Return the two tensors of rank `owner`, (rows, heads, its tokens, width), that lie in `buffer`."""
        first, second = buffer.view(2, self._rows, self._heads, self._lengths[owner], self._width)
        return first, second

    def exchange(self, buffer: Tensor, owner: int, label: str) -> tuple[Tensor, Work]:
        """Send `buffer`, what it has of rank `owner`, to the next rank; returns where what the rank before has will be.

        That is of the rank before `owner`. Both buffers are in use until the work was waited for.
        """
        communicator = self._communicator
        rank, ranks = communicator.rank, communicator.world_size
        numel = 2 * self._rows * self._heads * self._lengths[(owner - 1) % ranks] * self._width
        arriving = torch.empty(numel, dtype=self._like.dtype, device=self._like.device)
        wrap = communicator.accelerator.wrap
        messages = [message_to(wrap(buffer), (rank + 1) % ranks), message_from(wrap(arriving), (rank - 1) % ranks)]
        return arriving, communicator.batch(messages, async_op=True, label=label)


def _side_by_side(one: Tensor, other: Tensor) -> Tensor:
    return torch.stack((one, other)).view(-1)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        communicator: Communicator,
        lengths: Sequence[int],
        plans: Sequence[Plan],
        kernel: AttentionKernel,
        scale: float,
    ) -> Tensor:
        rank, ranks = communicator.rank, communicator.world_size
        ring = _Passing(communicator, lengths, k.shape, k)
        held, merging = _side_by_side(k, v), OnlineSoftmax(q)
        for turn in range(ranks):
            owner = (rank - turn) % ranks
            arriving, work = ring.exchange(held, owner, "ring: keys") if turn < ranks - 1 else (held, DONE)
            forward_pieces(merging, plans[owner], kernel, q, *ring.split_pair(held, owner), scale)
            work.wait()
            held = arriving
        out = merging.out
        ctx.save_for_backward(q, k, v, out, merging.sums)
        ctx.arguments = communicator, lengths, plans, kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        communicator, lengths, plans, kernel, scale = ctx.arguments
        rank, ranks = communicator.rank, communicator.world_size
        of_q, own_k, own_v = (zeros_for_gradients(one) for one in (q, k, v))
        saved = Saved(grad.contiguous(), q, out, sums)
        ring = _Passing(communicator, lengths, k.shape, k)
        behind = _Passing(communicator, lengths, k.shape, own_k)
        held = _side_by_side(k, v)
        arriving, work = ring.exchange(held, rank, "ring: keys") if ranks > 1 else (held, DONE)
        backward_pieces((of_q, own_k, own_v), plans[rank], kernel, saved, k, v, scale)
        gradients = torch.empty(0)
        travelling: Work = DONE
        for turn in range(1, ranks):
            owner = (rank - turn) % ranks
            work.wait()
            held = arriving
            if turn < ranks - 1:
                arriving, work = ring.exchange(held, owner, "ring: keys")
            found = torch.zeros(2 * own_k[:, :, :1].numel() * lengths[owner], dtype=own_k.dtype, device=own_k.device)
            of_k, of_v = behind.split_pair(found, owner)
            backward_pieces((of_q, of_k, of_v), plans[owner], kernel, saved, *ring.split_pair(held, owner), scale)
            travelling.wait()  # the sums of the ranks before this one, whose turn with these keys was earlier
            if turn > 1:
                found += gradients
            gradients, travelling = behind.exchange(found, owner, "ring: gradients")
        travelling.wait()
        if ranks > 1:
            for own, arrived in zip((own_k, own_v), behind.split_pair(gradients, rank), strict=True):
                own += arrived
        return of_q.to(q.dtype), own_k.to(k.dtype), own_v.to(v.dtype), None, None, None, None, None


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    communicator: Communicator,
    *,
    rule: AttentionRule,
    marks: DocumentMask,
    shares: TokenShares,
    scale: float | None = None,
    plans: Sequence[Plan] | None = None,
) -> Tensor:
    """Attention of a sequence that is cut over the ranks of `communicator` by `shares`, in any order.

    Queries, keys and values are (rows, heads, tokens of the rank, width); there may be fewer key heads than query
    heads. The result is as the queries, with the width of the values. `plans` are what `ring_plans` made of the same
    arguments, for callers with several layers.
    """
    require_rows(marks, len(q))
    rank = communicator.rank
    if q.shape[2] != shares.lengths[rank] or k.shape[2] != shares.lengths[rank] or marks.length != shares.total:
        raise ShardingError(
            f"rank {rank} has {q.shape[2]} queries and {k.shape[2]} keys of {marks.length} tokens; its share is "
            f"{shares.lengths[rank]} of {shares.total}",
            hint="cut all tensors by the shares",
            value=shares.lengths,
        )
    scale, width = default_scale(q, scale), v.shape[-1]
    q, k, v = widened(*promoted(q, k, v))
    kernel = kernel_for(q)
    found = plans if plans is not None else ring_plans(marks, rule, shares, rank, kernel)
    out: Tensor = _RingAttention.apply(q, k, v, communicator, shares.lengths, found, kernel, scale)  # type: ignore[no-untyped-call]
    return out[..., :width]
