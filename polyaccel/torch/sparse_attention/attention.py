"""Attention over the blocks of a layout, on any device: only blocks that are seen are computed.

[Note: Rows of blocks]
A row is a block of queries of one head. It attends to the blocks of keys that it sees, gathered side by side. Rows that
see about equally many are computed together, filled up to a power of two. So a few rows that see everything, global
ones, do not make the others as wide.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from polyaccel.errors import PolyaccelError

Method = Literal["blocks", "dense", "flex"]


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    method: Method = "blocks",
) -> Tensor:
    """Return attention of queries to the keys whose blocks a layout lets them see.

    Args:
        query: (batch, heads, length, width).
        key: The same shape.
        value: The same shape.
        layout: Seen blocks, (heads, blocks, blocks), such as `BlockPattern.layout` makes.
        scale: Factor on scores; None is 1 / sqrt(width).
        is_causal: No token sees a later one.
        bias: Added to scores, (batch or 1, heads or 1, length, length), or fewer dimensions from the right.
        key_bias: Added to the scores of each key, (batch, length).
        method: "blocks" computes seen blocks alone. "dense" computes all scores. "flex" is torch's flex attention,
            which has no gradients on CPUs and takes no biases here.

    Returns:
        (batch, heads, length, width). A query that sees nothing gets zeros.

    Raises:
        PolyaccelError: Shapes do not fit.
    """
    batch, heads, length, width = query.shape
    blocks = layout.shape[-1]
    if key.shape != query.shape or value.shape != query.shape or length % blocks or layout.shape[0] != heads:
        shapes = [tuple(one.shape) for one in (query, key, value, layout)]
        hint = "give self-attention with a layout of its heads, and a length of whole blocks"
        raise PolyaccelError(f"sparse attention cannot take shapes {shapes}", hint=hint, value=shapes)
    scale = width**-0.5 if scale is None else scale
    layout = layout.to(query.device, torch.bool)
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())].expand(-1, -1, length, length)
    if method == "flex":
        return _by_flex(query, key, value, layout, scale, is_causal, bias, key_bias)
    if method == "dense":
        return _by_scores(query, key, value, layout, scale, is_causal, bias, key_bias)
    size = length // blocks
    queries, keys, values = (one.reshape(batch, heads, blocks, size, width) for one in (query, key, value))
    tiles = None if bias is None else bias.reshape(*bias.shape[:2], blocks, size, blocks, size).transpose(3, 4)
    found, places = [], []
    for head, row, seen, is_seen in _rows(layout):
        count, wide = seen.shape
        part = queries[:, head, row]
        near = keys[:, head[:, None], seen].reshape(batch, count, wide * size, width)
        scores = part @ near.transpose(-1, -2) * scale
        if tiles is not None:
            of_head = head if tiles.shape[1] > 1 else torch.zeros_like(head)
            own = tiles[:, of_head[:, None], row[:, None], seen]
            scores = scores + own.transpose(2, 3).reshape(own.shape[0], count, size, wide * size)
        if key_bias is not None:
            own = key_bias.reshape(batch, blocks, size)[:, seen]
            scores = scores + own.reshape(batch, count, 1, wide * size)
        visible = is_seen.repeat_interleave(size, 1)[:, None]
        if is_causal:
            inside = torch.arange(size, device=query.device)
            places_of_keys = (seen[:, :, None] * size + inside).reshape(count, 1, -1)
            visible = visible & (places_of_keys <= (row[:, None] * size + inside)[:, :, None])
        weights = _softmax(scores, visible)
        mixed = weights @ values[:, head[:, None], seen].reshape(batch, count, wide * size, width)
        found.append(mixed)
        places.append(head * blocks + row)
    order = torch.cat(places).argsort()
    return torch.cat(found, 1)[:, order].reshape(batch, heads, length, width)


def _rows(layout: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Rows that are computed together: heads, rows, the blocks that they see, and which of these they do see."""
    counts = layout.sum(-1)
    wide = 2 ** counts.clamp(min=1).double().log2().ceil().long()
    wide = wide.clamp(max=layout.shape[-1])
    first = (~layout).to(torch.uint8).argsort(dim=-1, stable=True)  # the seen blocks come first
    groups = []
    for count in sorted(set(wide.flatten().tolist())):
        head, row = (wide == count).nonzero(as_tuple=True)
        is_seen = torch.arange(count, device=layout.device) < counts[head, row][:, None]
        groups.append((head, row, first[head, row][:, :count], is_seen))
    return groups


def _softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over what is visible, of which -inf in `scores` is not; zeros where nothing is."""
    hidden = scores.masked_fill(~visible, float("-inf"))
    most = hidden.detach().amax(-1, keepdim=True)
    powers = (hidden - most.masked_fill(most == float("-inf"), 0.0)).exp()
    return powers / powers.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def _visible(layout: Tensor, length: int, is_causal: bool) -> Tensor:
    size = length // layout.shape[-1]
    found = layout.repeat_interleave(size, 1).repeat_interleave(size, 2)
    return found.tril() if is_causal else found


def _by_scores(
    query: Tensor, key: Tensor, value: Tensor, layout: Tensor, scale: float, is_causal: bool,
    bias: Tensor | None, key_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    scores = query @ key.transpose(-1, -2) * scale
    scores = scores if bias is None else scores + bias
    scores = scores if key_bias is None else scores + key_bias[:, None, None]
    return _softmax(scores, _visible(layout, query.shape[2], is_causal)) @ value


def _by_flex(
    query: Tensor, key: Tensor, value: Tensor, layout: Tensor, scale: float, is_causal: bool,
    bias: Tensor | None, key_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if bias is not None or key_bias is not None:
        hint = 'use "blocks", or a score_mod with flex_attention itself'
        raise PolyaccelError("flex attention takes no bias here", hint=hint, value="flex")
    length, size = query.shape[2], query.shape[2] // layout.shape[-1]

    def sees(batch: Tensor, head: Tensor, place: Tensor, other: Tensor) -> Tensor:
        found = layout[head, place // size, other // size]
        return found & (other <= place) if is_causal else found

    mask = create_block_mask(sees, None, len(layout), length, length, device=query.device.type, BLOCK_SIZE=size)
    output = flex_attention(query, key, value, block_mask=mask, scale=scale)
    assert isinstance(output, Tensor)  # nothing else was asked for
    return output
