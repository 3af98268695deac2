"""Attention of whole sequences by the textbook, against which sequences over ranks are held."""

from __future__ import annotations

import torch
from torch import Tensor

from polyaccel.torch.context_parallel.block_mask import AttentionRule, DocumentMask
from polyaccel.torch.context_parallel.shares import TokenShares

MARKS = ("plain", "packed", "padded", "packed and padded", "scattered")


def marks_of(kind: str, rows: int, length: int) -> DocumentMask:
    """Documents and padding of a batch: rows differ where they can."""
    generator = torch.Generator().manual_seed(7)
    segments = is_key = None
    if "packed" in kind:
        begun = torch.rand(rows, length, generator=generator) < 4 / length
        segments = begun.cumsum(-1)
    if "padded" in kind:
        is_key = torch.ones(rows, length, dtype=torch.bool)
        is_key[0, -(length // 4) :] = False
        is_key[-1, : length // 3] = False
    if kind == "scattered":
        is_key = torch.rand(rows, length, generator=generator) < 0.6
        segments = torch.randint(3, (rows, length), generator=generator).sort(-1).values
    return DocumentMask(length, segments, is_key)


def visible(marks: DocumentMask, rule: AttentionRule, rows: int) -> Tensor:
    """(rows, 1, queries, keys): which query sees which key."""
    segments = torch.stack([row.segments for row in marks.rows]).expand(rows, -1)
    is_key = torch.stack([row.is_key for row in marks.rows]).expand(rows, -1)
    mask = (segments[:, :, None] == segments[:, None, :]) & is_key[:, None, :]
    distance = torch.arange(marks.length)[:, None] - torch.arange(marks.length)
    if rule.causal:
        mask = mask & (distance >= 0)
    if rule.window is not None:
        mask = mask & (distance < rule.window)
    return mask[:, None]


def textbook(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Attention by its formula; 0 for a query that sees no key."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, torch.finfo(q.dtype).min / 4)
    return (scores.softmax(-1) * mask.any(-1, keepdim=True)) @ v


def random_inputs(
    rows: int, length: int, heads: int, key_heads: int, width: int, value_width: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Queries, keys, values, and the gradient of the output."""
    generator = torch.Generator().manual_seed(length + heads)
    shapes = [(heads, width), (key_heads, width), (key_heads, value_width), (heads, value_width)]
    return [
        torch.randn(rows, count, length, one, generator=generator, dtype=torch.float64).to(dtype)
        for count, one in shapes
    ]


def gradients_of(compute, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The output of `compute(q, k, v)`, and the gradients of its inputs where that of the output is `grad`."""
    leaves = [tensor.detach().clone().requires_grad_(True) for tensor in inputs]
    out = compute(*leaves)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def own_tokens(tensor: Tensor, shares: TokenShares, rank: int, dim: int = 2) -> Tensor:
    """A rank's tokens of a whole tensor."""
    return torch.cat([tensor.narrow(dim, start, end - start) for start, end in shares.spans[rank]], dim)


def whole_of(parts: list[Tensor], shares: TokenShares, dim: int = 2) -> Tensor:
    """All ranks' tokens, in the order of the sequence."""
    shape = list(parts[0].shape)
    shape[dim] = shares.total
    whole = parts[0].new_empty(shape)
    for part, spans in zip(parts, shares.spans, strict=True):
        place = 0
        for start, end in spans:
            whole.narrow(dim, start, end - start).copy_(part.narrow(dim, place, end - start))
            place += end - start
    return whole
