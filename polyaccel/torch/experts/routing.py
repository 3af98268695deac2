"""Pairs of tokens and experts: which choices count where experts have limited room, and who computes what."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from polyaccel.torch.experts.gates import best, tokens_of


class Routing(NamedTuple):
    """Pairs of a token and an expert, ordered by expert, then by token; choices that are none stand last.

    How many are pairs only the device has: `keep` cuts the others off, for callers that have read `counts`.
    """

    tokens: Tensor
    """(choices,), int64."""
    weights: Tensor
    """(choices,)."""
    counts: Tensor
    """(experts,), int64: the pairs of each expert."""

    def keep(self, pairs: int) -> Routing:
        """Return the first `pairs`, the sum of `counts`."""
        return self._replace(tokens=self.tokens[:pairs], weights=self.weights[:pairs])

    def combined(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Return (tokens, features): by token the weighted sum of its pairs' `rows`."""
        weighted = (rows * self.weights.unsqueeze(1)).to(tokens.dtype)
        return torch.zeros_like(tokens).index_add(0, self.tokens, weighted)


def capacity_of(tokens: int, experts: int, k: int, factor: float, least: int) -> int:
    """Return an expert's capacity: even share times `factor`, rounded up, at least `least` (Switch, eq. 3)."""
    return max(ceil(tokens * k / experts * factor), least)


def kept_choices(experts: Tensor, count: int, capacity: int | None = None, order: Tensor | None = None) -> Tensor:
    """(tokens, k), bool: which choices of `experts` (tokens, k) count; a number past the `count` there are is none.

    An expert takes no more than `capacity` tokens (None: all): first choices before second ones, in the tokens' order,
    or by rising `order` (tokens,): random numbers make this random token selection, falling weights the batch priority
    of Riquelme et al. 2021.
    """
    kept = experts < count
    if capacity is None:
        return kept
    tokens, k = experts.shape
    numbers = torch.arange(tokens, device=experts.device)
    ranked = numbers if order is None else torch.sort(order, stable=True).indices
    wanted = experts[ranked].T.reshape(-1).clamp(max=count)  # all first choices, then all second ones
    by_expert = torch.sort(wanted, stable=True).indices
    sizes = tokens_of(wanted, count + 1)
    begins = torch.cumsum(sizes, 0) - sizes
    place = torch.empty_like(wanted)
    place[by_expert] = torch.arange(len(wanted), device=wanted.device) - begins[wanted[by_expert]]
    kept[ranked] &= (place < capacity).view(k, tokens).T
    return kept


def chosen_by_experts(scores: Tensor, capacity: int) -> Tensor:
    """Return (tokens, experts) bool: each expert's `capacity` best `scores` (Zhou et al. 2022, eq. 2)."""
    tokens = best(scores.T, min(capacity, len(scores)))
    return torch.zeros_like(scores.T, dtype=torch.bool).scatter_(1, tokens, True).T.contiguous()


def route(experts: Tensor, weights: Tensor, count: int) -> Routing:
    """Return pairs of tokens and `experts` (tokens, k) with `weights`; numbers from `count` on are none."""
    chosen = experts.reshape(-1).clamp(max=count)
    pairs = torch.sort(chosen, stable=True).indices
    tokens = torch.div(pairs, experts.shape[1], rounding_mode="floor")
    return Routing(tokens, weights.reshape(-1)[pairs], tokens_of(chosen, count))
