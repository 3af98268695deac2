"""Which experts a token goes to, and with what weight: functions of the logits (tokens, experts) of a router.

All compute in float32 at least, and choose the lower number where scores are equal. Gradients go through weights and
losses; choices have none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from polyaccel.errors import PolyaccelError


class RoutingDecision(NamedTuple):
    """The experts of each token, the best first."""

    experts: Tensor
    """(tokens, k), int64."""
    weights: Tensor
    """(tokens, k): what each expert's output is multiplied by."""
    scores: Tensor
    """(tokens, experts), probabilities or affinities: what losses about balance are made of."""


def is_normalized(normalize: bool | None, k: int) -> bool:
    """Return whether `k` weights are normalized; None: if more than one. Raises for True with k = 1."""
    if normalize and k == 1:
        raise PolyaccelError(
            "normalize=True with k = 1: each token's only weight would be 1, so the router would not be trained",
            hint="leave normalize out, which takes the score itself (Switch Transformers, eq. 2), or use k = 2",
            value=k,
        )
    return k > 1 if normalize is None else normalize


def softmax_choice(
    logits: Tensor, k: int, *, normalize: bool | None = None, by: Tensor | None = None
) -> RoutingDecision:
    """The `k` experts with the highest probabilities, which are the weights.

    `normalize` divides a token's weights by their sum: Shazeer et al. 2017 ("Outrageously Large Neural Networks", eq.
    3: a softmax over the kept logits) and Mixtral. Switch Transformers (Fedus et al. 2022, eq. 2) has k = 1 and does
    not, so None normalizes where k > 1. `by` (tokens, experts) are scores to choose by instead, for example noisy
    logits. Raises PolyaccelError as `is_normalized` does.
    """
    is_shared = is_normalized(normalize, k)
    scores = torch.softmax(_precise(logits), dim=-1)
    experts = best(scores if by is None else by, k)
    weights = scores.gather(1, experts)
    return RoutingDecision(experts, weights / weights.sum(1, keepdim=True) if is_shared else weights, scores)


def sigmoid_choice(
    logits: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    normalize: bool | None = None,
    scale: float = 1.0,
) -> RoutingDecision:
    """The `k` experts with the highest sigmoids, which are the weights: DeepSeek-V3 (DeepSeek-AI 2024, 2.1.2, eq. 12 to
    16).

    `bias` (experts,) is added for the choice alone: balance without a loss (Wang et al. 2024). Of `groups` of
    neighbours a token may choose from those `kept_groups` whose two best experts have the highest sum. `scale`
    multiplies the weights. `normalize` and its error are those of `softmax_choice`.
    """
    is_shared = is_normalized(normalize, k)
    scores = torch.sigmoid(_precise(logits))
    by = scores.detach() if bias is None else scores.detach() + bias
    if kept_groups < groups:
        grouped = by.view(len(by), groups, -1)
        of_group = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
        kept = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best(of_group, kept_groups), True)
        by = grouped.masked_fill(~kept.unsqueeze(2), -torch.inf).flatten(1)
    experts = best(by, k)
    weights = scores.gather(1, experts)
    if is_shared:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return RoutingDecision(experts, weights * scale, scores)


def best(scores: Tensor, k: int) -> Tensor:
    """(rows, k): where the `k` highest of each row stand, the highest first, the lower number first among equals."""
    return torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :k]


def noisy_logits(logits: Tensor, spread: Tensor, noise: Tensor) -> Tensor:
    """Add noise of learned `spread` (tokens, experts) to logits: Shazeer et al. 2017, eq. 4."""
    return _precise(logits) + noise * functional.softplus(_precise(spread))


def gumbel_noise(uniform: Tensor) -> Tensor:
    """Return Gumbel noise of uniform numbers: the best of `logits + noise` samples the softmax (RSample)."""
    return -torch.log(-torch.log(uniform))


def balance_loss(choice: RoutingDecision, *, first: bool = False) -> Tensor:
    """How unevenly tokens go: experts x sum over experts of (share of the tokens that choose it) x (mean score).

    With probabilities and k = 1 this is Switch Transformers' (Fedus et al. 2022, eq. 4), with more choices that of
    transformers' Mixtral; `first` counts first choices alone, as GShard does (Lepikhin et al. 2021, 2.2). It is 1 (k
    choices: k) where all is even. Of no tokens it is 0.
    """
    experts = choice.experts[:, :1] if first else choice.experts
    tokens, count = choice.scores.shape
    if not tokens:
        return choice.scores.sum()
    share = tokens_of(experts, count).to(choice.scores.dtype) / tokens
    return count * (share * choice.scores.mean(0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """The mean of the squared logarithms of the softmax's sums: ST-MoE (Zoph et al. 2022, eq. 5); 0 of no tokens."""
    sums = torch.logsumexp(_precise(logits), dim=-1).square()
    return sums.mean() if len(logits) else sums.sum()


def load_direction(tokens: Tensor) -> Tensor:
    """Return (experts,) int64 bias steps: 1 below the mean of `tokens`, -1 above (Wang et al. 2024)."""
    return torch.sign(tokens.sum() - tokens * len(tokens))


def tokens_of(experts: Tensor, count: int) -> Tensor:
    """(count,), int64: how often each expert is chosen; numbers from `count` on are none."""
    numbers = experts.reshape(-1).clamp(max=count)
    # Not by torch.bincount: it asks a device for the highest number.
    return numbers.new_zeros(count + 1).scatter_add_(0, numbers, torch.ones_like(numbers))[:count]


def _precise(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
