"""Attention of queries to some of the keys, with the logarithm of its sums, and its gradients: all attention here is
made of these two functions. They are torch's flash attention on the CPU, elsewhere matrix products in float32.

Queries are (rows, heads, queries, width), keys and values (rows, key heads, keys, width); each key head serves equally
many consecutive query heads. Sums are (rows, heads, queries): log(sum(exp(score))), -inf where a query saw no key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polyaccel.torch.context_parallel.block_mask import AttentionPiece, MaskKind

LONGEST = 1024
"""The longest side of a piece where a number is held for each pair of tokens."""
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """How one piece is computed on a device."""

    forward: Callable[[Tensor, Tensor, Tensor, AttentionPiece, float], tuple[Tensor, Tensor]]
    """(queries, keys, values of the piece, piece, scale) -> (output, sums)."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, AttentionPiece, float], Gradients]
    """(gradient of the output, queries, keys, values, output, sums over all pieces, piece, scale) -> gradients."""
    longest: int | None
    """The longest side of a piece; None where memory does not grow with the pairs of tokens."""


def kernel_for(tensor: Tensor) -> AttentionKernel:
    """The kernel of the device and type of `tensor`."""
    is_known = tensor.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    return FLASH_CPU if tensor.device.type == "cpu" and is_known else PRODUCTS


def _grouped(keys: Tensor, heads: int) -> Tensor:
    """`keys` with a key head for each of `heads`."""
    group = heads // keys.shape[1]
    return keys if group == 1 else keys.repeat_interleave(group, 1)


def _summed(gradient: Tensor, key_heads: int) -> Tensor:
    """The gradient of what `_grouped` repeated."""
    heads = gradient.shape[1]
    if heads == key_heads:
        return gradient
    found: Tensor = gradient.unflatten(1, (key_heads, heads // key_heads)).sum(2)  # type: ignore[no-untyped-call]
    return found


# torch's own, on the CPU.


def _one_row(tensor: Tensor, key_heads: int) -> Tensor:
    """One row of `tensor` with its key heads as rows, and the query heads of each as heads: a view."""
    found: Tensor = tensor[0].unflatten(0, (key_heads, -1))  # type: ignore[no-untyped-call]
    return found


def _rows_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Query, key and value heads in equal number, without a copy where there is one row."""
    if q.shape[1] == k.shape[1]:
        return q, k, v
    if len(q) > 1:
        return q, _grouped(k, q.shape[1]), _grouped(v, q.shape[1])
    key_heads = k.shape[1]
    group = q.shape[1] // key_heads
    k, v = (_one_row(one, key_heads).expand(-1, group, -1, -1) for one in (k, v))
    return _one_row(q, key_heads), k, v


def _additive(piece: AttentionPiece, like: Tensor) -> Tensor | None:
    if piece.mask is None:
        return None
    return torch.zeros(piece.mask.shape, dtype=like.dtype).masked_fill_(~piece.mask, -torch.inf)[None, None]


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, piece: AttentionPiece, scale: float) -> tuple[Tensor, Tensor]:
    shape = q.shape
    q, k, v = _rows_of_keys(q, k, v)
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, piece.kind is MaskKind.CAUSAL, attn_mask=_additive(piece, q), scale=scale
    )
    if piece.mask is not None:
        sums = sums.masked_fill(~piece.mask.any(1), -torch.inf)  # torch gives 0 for a query that sees no key
    return out.reshape(shape), sums.reshape(shape[:-1])


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, piece: AttentionPiece, scale: float
) -> Gradients:
    shape, key_shape = q.shape, k.shape
    sums = sums.masked_fill(sums == -torch.inf, 0.0)
    many = q.shape[1] != k.shape[1] and len(q) == 1
    if many:
        grad, out, sums = (_one_row(one, k.shape[1]) for one in (grad, out, sums))
    q, k, v = _rows_of_keys(q, k, v)
    of_q, of_k, of_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, sums, 0.0, piece.kind is MaskKind.CAUSAL, attn_mask=_additive(piece, q), scale=scale
    )
    if many:
        return of_q.reshape(shape), of_k.sum(1).reshape(key_shape), of_v.sum(1).reshape(key_shape)
    return of_q, _summed(of_k, key_shape[1]), _summed(of_v, key_shape[1])


# Matrix products, on every device.


def _scores(q: Tensor, k: Tensor, piece: AttentionPiece, scale: float) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).mul_(scale)
    if piece.kind is MaskKind.CAUSAL:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1), -torch.inf)
    elif piece.mask is not None:
        scores.masked_fill_(~piece.mask.to(q.device), -torch.inf)
    return scores


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _products_forward(q: Tensor, k: Tensor, v: Tensor, piece: AttentionPiece, scale: float) -> tuple[Tensor, Tensor]:
    heads = q.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        scores = _scores(_wide(q), _wide(_grouped(k, heads)), piece, scale)
        sums = scores.logsumexp(-1)
        shift = sums.masked_fill(sums == -torch.inf, 0.0)
        out = scores.sub_(shift[..., None]).exp_() @ _wide(_grouped(v, heads))
    return out, sums


def _products_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, piece: AttentionPiece, scale: float
) -> Gradients:
    heads, key_heads = q.shape[1], k.shape[1]
    wide_q, grad = _wide(q), _wide(grad)
    wide_k, wide_v = _wide(_grouped(k, heads)), _wide(_grouped(v, heads))
    with torch.autocast(q.device.type, enabled=False):
        shift = sums.masked_fill(sums == -torch.inf, 0.0)
        shares = _scores(wide_q, wide_k, piece, scale).sub_(shift[..., None]).exp_()
        of_v = shares.transpose(-1, -2) @ grad
        inner = (grad @ wide_v.transpose(-1, -2)).sub_((grad * _wide(out)).sum(-1, keepdim=True)).mul_(shares)
        of_q = (inner @ wide_k).mul_(scale)
        of_k = (inner.transpose(-1, -2) @ wide_q).mul_(scale)
    return of_q, _summed(of_k, key_heads), _summed(of_v, key_heads)


FLASH_CPU = AttentionKernel(_flash_forward, _flash_backward, None)
PRODUCTS = AttentionKernel(_products_forward, _products_backward, LONGEST)
