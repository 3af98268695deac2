"""Quantised values and pruning masks, as functions of whole tensors.

Symmetric levels are those of Zafrir et al. 2019 (Q8BERT, arXiv 1910.06188), asymmetric ones those of Jacob et al. 2018
(arXiv 1712.05877, section 2). 2 bits are ternary (Li et al. 2016, arXiv 1605.04711), and 1 bit is a sign with the mean
magnitude (Rastegari et al. 2016, arXiv 1603.05279). Groups are those of Shen et al. 2020 (Q-BERT, arXiv 1909.05840):
runs of a flat weight, each with its scale. Scores are those of movement pruning (Sanh et al. 2020, arXiv 2005.07683).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BINARY, TERNARY = 1, 2
_TERNARY_THRESHOLD = 0.7


def same(largest_of_part: Tensor) -> Tensor:
    """Return what is given: the largest values of whole rows are those that are here."""
    return largest_of_part


def quantized_rows(
    rows: Tensor,
    bits: int,
    *,
    is_symmetric: bool,
    noise: Tensor | None = None,
    agree: Callable[[Tensor], Tensor] = same,
) -> Tensor:
    """Return each row of a float matrix at the nearest levels of its range; `noise` from 0 to 1 rounds by chance.

    `agree` makes the largest value of whole rows of that of parts, with 3 bits or more.
    """
    if bits == BINARY:
        return torch.where(rows < 0, -1.0, 1.0) * rows.abs().mean(dim=1, keepdim=True)
    if bits == TERNARY:
        return _ternary(rows)
    if is_symmetric:
        top = float(2 ** (bits - 1) - 1)
        scale = agree(rows.abs().amax(dim=1, keepdim=True)) / top
        return levels(rows, scale, torch.zeros_like(scale), -top, top, noise)
    low = -agree(-rows.amin(dim=1, keepdim=True))
    scale = (agree(rows.amax(dim=1, keepdim=True)) - low) / float(2**bits - 1)
    return levels(rows, scale, low, 0.0, float(2**bits - 1), noise)


def levels(values: Tensor, scale: Tensor, low: Tensor, least: float, most: float, noise: Tensor | None) -> Tensor:
    """Return `low` and whole multiples of `scale`, from `least` to `most` of them; where the scale is 0, `low`."""
    steps = (values - low) / torch.where(scale == 0, torch.ones_like(scale), scale)
    whole = torch.round(steps) if noise is None else torch.floor(steps + noise)
    return whole.clamp(least, most) * scale + low


def _ternary(rows: Tensor) -> Tensor:
    magnitudes = rows.abs()
    is_kept = magnitudes > _TERNARY_THRESHOLD * magnitudes.mean(dim=1, keepdim=True)
    count = is_kept.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.sign(rows) * is_kept * ((magnitudes * is_kept).sum(dim=1, keepdim=True) / count)


def quantized_weight(weight: Tensor, bits: int, groups: int, *, is_symmetric: bool, noise: Tensor | None) -> Tensor:
    """Return `weight` quantised in `groups` runs of its elements, computed in float32 at least."""
    rows = weight.detach().reshape(groups, -1)
    rows = rows if rows.dtype == torch.float64 else rows.float()
    flat_noise = None if noise is None else noise.reshape(groups, -1)
    found = quantized_rows(rows, bits, is_symmetric=is_symmetric, noise=flat_noise)
    return found.reshape(weight.shape).to(weight.dtype)


def quantized_tokens(x: Tensor, bits: int, *, is_symmetric: bool, agree: Callable[[Tensor], Tensor] = same) -> Tensor:
    """Return `x` quantised with a range for each row of its last dimension (Yao et al. 2022, arXiv 2206.01861)."""
    rows = x.detach().reshape(-1, x.shape[-1])
    rows = rows if rows.dtype == torch.float64 else rows.float()
    found = quantized_rows(rows, bits, is_symmetric=is_symmetric, agree=agree)
    return found.reshape(x.shape).to(x.dtype)


def quantized_in_range(x: Tensor, bits: int, low: Tensor, high: Tensor, *, is_symmetric: bool) -> Tensor:
    """Return `x` quantised between `low` and `high`, or symmetrically to the larger magnitude of both."""
    values = x.detach() if x.dtype == torch.float64 else x.detach().float()
    low, high = low.to(values.dtype), high.to(values.dtype)
    if is_symmetric:
        top = float(2 ** (bits - 1) - 1)
        scale = torch.maximum(low.abs(), high.abs()) / top
        found = levels(values, scale, torch.zeros_like(scale), -top, top, None)
    else:
        found = levels(values, (high - low) / float(2**bits - 1), low, 0.0, float(2**bits - 1), None)
    return found.to(x.dtype)


def largest(scores: Tensor, dense_ratio: float) -> Tensor:
    """Return where the largest `dense_ratio` of `scores` are, at least one: 1 there and 0 elsewhere, as int8."""
    flat = scores.detach().flatten()
    kept = max(1, round(dense_ratio * flat.numel()))
    mask = torch.zeros(flat.numel(), dtype=torch.int8, device=flat.device)
    mask[torch.topk(flat, kept).indices] = 1
    return mask.view(scores.shape)


def magnitudes(weight: Tensor, dim: int, block: int) -> Tensor:
    """Return the L1 norm of each run of `block` slices of `weight` along `dim`."""
    others = [one for one in range(weight.dim()) if one != dim]
    sums = weight.detach().abs().float().sum(dim=others) if others else weight.detach().abs().float()
    return sums.view(-1, block).sum(dim=1)


def noise_for(name: str, step: int, like: Tensor) -> Tensor:
    """Return numbers from 0 to 1 that follow from `name` and `step` alone: equal on every rank, and a second time."""
    seed = (hash_of(name) * 1_000_003 + step) % 2**63
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(like.shape, generator=generator).to(like.device)


def hash_of(name: str) -> int:
    """Return a number for `name`, the same in every process."""
    found = 0
    for byte in name.encode():
        found = (found * 257 + byte) % 2**61
    return found
