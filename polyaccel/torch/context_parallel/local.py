"""Attention of this rank's queries to keys that it has, piece by piece: what Ulysses computes between its exchanges,
and what the ring computes in each of its turns.

[Note: Log-sum-exp merge]
Over keys in parts i, with outputs o_i and sums l_i = log(sum(exp(score))), attention is
    l = log(sum_i exp(l_i)),   o = sum_i exp(l_i - l) o_i
exactly. And the gradients of part i follow from o and l of the whole: the share of a key is exp(score - l), and
grad(score) = share * (grad(o) . v - grad(o) . o). So a backward pass computes each part's shares again from o and l.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyaccel.errors import ShardingError
from polyaccel.torch.context_parallel.block_mask import AttentionPiece, AttentionRule, DocumentMask, pieces
from polyaccel.torch.context_parallel.kernels import AttentionKernel, kernel_for
from polyaccel.torch.context_parallel.shares import Span

Plan = list[tuple[slice, list[AttentionPiece]]]
"""Rows of the batch, and the pieces in which their attention is computed."""


def plan_of(
    marks: DocumentMask, rule: AttentionRule, queries: Sequence[Span], keys: Sequence[Span], kernel: AttentionKernel
) -> Plan:
    """The pieces of each row; equal rows together."""
    found = [pieces(row, rule, queries, keys, kernel.longest) for row in marks.rows]
    return [(slice(None), found[0])] if len(found) == 1 else [(slice(at, at + 1), one) for at, one in enumerate(found)]


def require_rows(marks: DocumentMask, rows: int) -> None:
    """Raise ShardingError where marks of several rows are not those of this batch."""
    if len(marks.rows) not in (1, rows):
        raise ShardingError(
            f"marks of {len(marks.rows)} rows for a batch of {rows}", hint="mark every row", value=len(marks.rows)
        )


class OnlineSoftmax:
    """Outputs of parts, added up as [Note: Log-sum-exp merge] says. `out` and `sums` are the whole once all parts are
    in."""

    def __init__(self, queries: Tensor) -> None:
        self._dtype = queries.dtype
        wide = torch.promote_types(queries.dtype, torch.float32)
        self._wide = torch.zeros(queries.shape, dtype=wide, device=queries.device)
        self.sums = torch.full(queries.shape[:-1], -torch.inf, dtype=wide, device=queries.device)

    @property
    def out(self) -> Tensor:
        return self._wide.to(self._dtype)

    def add(self, rows: slice, piece: AttentionPiece, out: Tensor, sums: Tensor) -> None:
        """Take in what a piece has computed for its queries."""
        place = rows, slice(None), slice(piece.q0, piece.q1)
        before = self.sums[place]
        after = torch.logaddexp(before, sums)
        old, new = ((one - after).exp().nan_to_num_(0.0).unsqueeze(-1) for one in (before, sums))
        self._wide[place].mul_(old).addcmul_(out.to(self._wide.dtype), new)
        self.sums[place] = after


def forward_pieces(
    into: OnlineSoftmax, plan: Plan, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> None:
    """Compute the pieces of `plan` and add them to `into`."""
    for rows, found in plan:
        for piece in found:
            seen = rows, slice(None), slice(piece.k0, piece.k1)
            own = q[rows, :, piece.q0 : piece.q1]
            into.add(rows, piece, *kernel.forward(own, k[seen], v[seen], piece, scale))


@dataclass(frozen=True, slots=True)
class Saved:
    """What a backward pass needs of the whole: the gradient of the output, queries, output and sums."""

    grad: Tensor
    q: Tensor
    out: Tensor
    sums: Tensor


def backward_pieces(
    into: tuple[Tensor, Tensor, Tensor],
    plan: Plan,
    kernel: AttentionKernel,
    saved: Saved,
    k: Tensor,
    v: Tensor,
    scale: float,
) -> None:
    """Add the gradients of the pieces of `plan` to those of queries, keys and values, `into`."""
    for rows, found in plan:
        for piece in found:
            own, seen = (rows, slice(None), slice(piece.q0, piece.q1)), (rows, slice(None), slice(piece.k0, piece.k1))
            parts = saved.grad[own], saved.q[own], k[seen], v[seen], saved.out[own], saved.sums[own]
            for whole, place, part in zip(into, (own, seen, seen), kernel.backward(*parts, piece, scale), strict=True):
                whole[place].add_(part)


class _LocalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, kernel: AttentionKernel, scale: float) -> Tensor:
        ctx.plan, ctx.kernel, ctx.scale = plan, kernel, scale
        only = _only_piece(plan, q)
        if only is not None:
            out, sums = kernel.forward(q, k[:, :, only.k0 : only.k1], v[:, :, only.k0 : only.k1], only, scale)
            out = out.to(q.dtype)
        else:
            merging = OnlineSoftmax(q)
            forward_pieces(merging, plan, kernel, q, k, v, scale)
            out, sums = merging.out, merging.sums
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        only = _only_piece(ctx.plan, q)
        if only is not None and only.k0 == 0 and only.k1 == k.shape[2]:
            of_q, of_k, of_v = ctx.kernel.backward(grad, q, k, v, out, sums, only, ctx.scale)
            return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None, None
        into = zeros_for_gradients(q), zeros_for_gradients(k), zeros_for_gradients(v)
        backward_pieces(into, ctx.plan, ctx.kernel, Saved(grad, q, out, sums), k, v, ctx.scale)
        return into[0].to(q.dtype), into[1].to(k.dtype), into[2].to(v.dtype), None, None, None


def zeros_for_gradients(tensor: Tensor) -> Tensor:
    """Zeros in which the gradients of `tensor` are added up, in float32 at least."""
    return torch.zeros(tensor.shape, dtype=torch.promote_types(tensor.dtype, torch.float32), device=tensor.device)


def _only_piece(plan: Plan, q: Tensor) -> AttentionPiece | None:
    """The one piece that has all queries; None where there are several, or some query is in none."""
    if len(plan) != 1 or len(plan[0][1]) != 1:
        return None
    piece = plan[0][1][0]
    return piece if (piece.q0, piece.q1) == (0, q.shape[2]) else None


def promoted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in one type: that of autocast where it is on, as torch's own attention has it."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind) and tensors[0].dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    else:
        dtype = tensors[0].dtype
        for tensor in tensors[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def default_scale(q: Tensor, scale: float | None) -> float:
    """`scale`, or one over the root of the width of a head."""
    return float(q.shape[-1] ** -0.5) if scale is None else float(scale)


def widened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with heads of one width, the narrower ones filled up with zeros."""
    width = max(q.shape[-1], v.shape[-1])
    q, k, v = (
        one if one.shape[-1] == width else torch.nn.functional.pad(one, (0, width - one.shape[-1])) for one in (q, k, v)
    )
    return q, k, v


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rule: AttentionRule,
    marks: DocumentMask,
    scale: float | None = None,
    kernel: AttentionKernel | None = None,
) -> Tensor:
    """Attention of a whole sequence: queries (rows, heads, length, width), fewer key heads allowed, the result like the
    queries with the width of the values. Memory grows with the length, not with its square."""
    require_rows(marks, len(q))
    scale, width = default_scale(q, scale), v.shape[-1]
    q, k, v = widened(*promoted(q, k, v))
    found = kernel or kernel_for(q)
    span = [(0, marks.length)]
    out: Tensor = _LocalAttention.apply(q, k, v, plan_of(marks, rule, span, span, found), found, scale)  # type: ignore[no-untyped-call]
    return out[..., :width]
