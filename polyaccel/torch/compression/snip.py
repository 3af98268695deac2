"""Blocks of weights that are removed by what they mean to the loss, with momentum.

A weight's importance is the magnitude of its product with its gradient (SNIP, Lee et al. 2019, arXiv 1810.02340). Its
momentum, 0.9 of the sum so far and all of the new value, and blocks over all layers are Intel's Neural Compressor's
(Shen et al. 2022, arXiv 2211.07715), which DeepSpeed called. A layer keeps 2 % of its blocks, as there.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor, nn

from polyaccel.torch.api.fragments import peek_full, safe_get_full_fp32_param
from polyaccel.torch.compression.layers import Mask, as_matrix
from polyaccel.zero.fragments import GRAD

_MOMENTUM = 0.9
_LEAST_SHARE = 0.02


class BlockRemoval:
    """The masks of an engine's layers whose blocks are removed. All ranks have equal scores and masks."""

    def __init__(self, masks: list[Mask]) -> None:
        self._masks = masks

    @torch.no_grad()
    def follow_gradients(self) -> None:
        """Add the importance of each block in the step under way. Collective."""
        for mask in self._masks:
            weight: nn.Parameter = mask.layer._parameters["weight"]  # type: ignore[assignment]
            grad = peek_full(weight, GRAD)
            if grad is None:
                continue
            values = safe_get_full_fp32_param(weight)
            scores = _scores(mask)
            assert values is not None  # it has a gradient in this engine
            found = block_sums(mask.layer.compression.whole((values * grad.to(values)).abs()), mask)
            if bool(found.isfinite().all()):
                scores.mul_(_MOMENTUM).add_(found.to(scores))

    @torch.no_grad()
    def remove(self, step: int) -> None:
        """Remove the blocks that matter least, where a removal is due after `step` steps."""
        share = self._masks[0].rule.dense_share_at(step) if self._masks else None
        if share is None:
            return
        scores = [_scores(mask) for mask in self._masks]
        alive = [_is_alive(mask, one.shape) for mask, one in zip(self._masks, scores, strict=True)]
        for mask, kept in zip(self._masks, kept_blocks(scores, alive, share), strict=True):
            rows, columns = _block(mask)
            whole = kept.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            as_matrix(mask.layer, mask.values).copy_(whole.view_as(as_matrix(mask.layer, mask.values)))


def block_sums(values: Tensor, mask: Mask) -> Tensor:
    """Return the sum of `values`, of a weight's shape, in each of its blocks."""
    rows, columns = _block(mask)
    matrix = as_matrix(mask.layer, values)
    return matrix.reshape(matrix.shape[0] // rows, rows, matrix.shape[1] // columns, columns).sum((1, 3))


def kept_blocks(scores: list[Tensor], alive: list[Tensor], share: float) -> list[Tensor]:
    """Return where blocks stay, `share` of all: the largest scores over all layers, of blocks that are there. The
    largest few of each layer come first."""
    order = [torch.where(there, one, -1.0).flatten() for one, there in zip(scores, alive, strict=True)]
    for one in order:
        least = one.topk(ceil(_LEAST_SHARE * one.numel())).indices
        one[least] = torch.where(one[least] >= 0, torch.inf, one[least])
    joined = torch.cat(order)
    kept = torch.zeros_like(joined, dtype=torch.bool)
    kept[joined.topk(max(1, round(share * joined.numel()))).indices] = True
    kept &= joined >= 0
    parts = torch.split(kept, [one.numel() for one in order])
    return [part.view(one.shape) for part, one in zip(parts, scores, strict=True)]


def _is_alive(mask: Mask, shape: torch.Size) -> Tensor:
    """The blocks that were not removed before."""
    rows, columns = _block(mask)
    return as_matrix(mask.layer, mask.values)[::rows, ::columns].reshape(shape) != 0


def _block(mask: Mask) -> tuple[int, int]:
    assert mask.rule.removal is not None  # only such masks are here
    return mask.rule.removal.block


def _scores(mask: Mask) -> Tensor:
    scores = mask.layer._buffers["snip_scores"]
    assert scores is not None  # registered with the mask
    return scores
