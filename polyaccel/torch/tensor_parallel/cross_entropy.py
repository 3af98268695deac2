"""Cross-entropy of logits that the ranks hold by parts of the vocabulary (Shoeybi et al., 2019).

Two exchanges of a few numbers a token replace that of all logits. Computed in float32, or float64 where logits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from polyaccel.errors import ShardingError
from polyaccel.torch.context_parallel.losses import IGNORED, CausalLoss
from polyaccel.torch.graph_breaks import outside_graphs
from polyaccel.torch.tensor_parallel.ranks import TensorRanks

Reduction = Literal["mean", "sum", "none"]


@outside_graphs
def vocabulary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ranks: TensorRanks,
    sizes: Sequence[int],
    *,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the loss of torch's cross_entropy over `logits` cut by `sizes`; `targets` are global words."""
    if logits.shape[:-1] != targets.shape or logits.dim() < 1 or logits.shape[-1] != sizes[ranks.rank]:
        raise ShardingError(
            f"logits of shape {tuple(logits.shape)} on rank {ranks.rank} do not fit to targets of shape "
            f"{tuple(targets.shape)} and parts {list(sizes)} of the vocabulary",
            hint="logits are (..., this rank's words), targets (...)",
            value=tuple(logits.shape),
        )
    rows = logits.reshape(-1, logits.shape[-1])
    words = targets.reshape(-1)
    losses = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows, words, ranks, ranks.first(sizes), sum(sizes), ignore_index, label_smoothing
    )
    if reduction == "none":
        return losses.view(targets.shape)  # type: ignore[no-any-return]
    if reduction == "sum":
        return losses.sum()  # type: ignore[no-any-return]
    return losses.sum() / (words != ignore_index).sum()  # type: ignore[no-any-return]


def over_ranks(ranks: TensorRanks, log_sums: Tensor, *facts: Tensor) -> tuple[Tensor, ...]:
    """Combine ranks' log sums and `facts`, (rows,) each, by two exchanges."""
    largest = ranks.maximum(log_sums.clone())
    parts, *added = ranks.sum(torch.stack([(log_sums - largest).exp_(), *facts]))
    return largest + parts.log(), *added


class VocabularyLoss(CausalLoss):
    """`CausalLoss` for logits of this rank's words."""

    def __init__(self, ranks: TensorRanks, sizes: Sequence[int]) -> None:
        self._ranks = ranks
        self._sizes = tuple(sizes)

    def _total(self, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        return vocabulary_cross_entropy(
            logits, targets, self._ranks, self._sizes, ignore_index=ignored, reduction="sum"
        )


class _CrossEntropy(Function):
    """The loss of each row, 0 where the target is to be ignored."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, words: Tensor, ranks: TensorRanks, first: int, vocabulary: int, ignored: int,
        smoothing: float,
    ) -> Tensor:  # fmt: skip
        numbers = logits.to(torch.promote_types(logits.dtype, torch.float32))
        place = words - first
        is_here = (place >= 0) & (place < logits.shape[-1])
        place = place.masked_fill(~is_here, 0).unsqueeze(-1)
        facts = [numbers.gather(-1, place).squeeze(-1).masked_fill_(~is_here, 0)]
        if smoothing:
            facts.append(numbers.sum(-1))
        log_sums, *added = over_ranks(ranks, torch.logsumexp(numbers, -1), *facts)
        losses = log_sums - added[0]
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (log_sums - added[1] / vocabulary)
        counts = words != ignored
        ctx.save_for_backward(logits, log_sums, place, is_here & counts, counts)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        return losses.masked_fill_(~counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sums, place, is_here, counts = ctx.saved_tensors
        found = torch.exp(logits.to(log_sums.dtype) - log_sums.unsqueeze(-1))
        if ctx.smoothing:
            found -= ctx.smoothing / ctx.vocabulary
        found.scatter_add_(-1, place, is_here.to(found.dtype).mul_(ctx.smoothing - 1).unsqueeze(-1))
        found *= grad.masked_fill(~counts, 0).unsqueeze(-1)
        return found.to(logits.dtype), None, None, None, None, None, None
