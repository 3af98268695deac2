"""Pairs of tokens and experts: who computes what, after experts that are over-full have let tokens go."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from polyaccel.torch.experts.gates import Choice, best, tokens_of


class Routing(NamedTuple):
    """Pairs of a token and an expert, ordered by expert, then by token."""

    tokens: Tensor
    """(pairs,), int64."""
    weights: Tensor
    """(pairs,)."""
    counts: Tensor
    """(experts,), int64: the pairs of each expert."""
    dropped: Tensor
    """int64 without dims: how many choices came to nothing."""


def capacity_of(tokens: int, experts: int, k: int, factor: float, least: int) -> int:
    """How many tokens an expert takes: its even share times `factor`, rounded up (GShard; Switch, eq. 3), at least
    `least`."""
    return max(ceil(tokens * k / experts * factor), least)


def route(choice: Choice, *, capacity: int | None = None, order: Tensor | None = None) -> Routing:
    """The pairs of a choice; a number past the last expert is none.

    An expert takes no more than `capacity` tokens (None: all): first choices before second ones, in the tokens' order,
    or by rising `order` (tokens,): random numbers make this random token selection, falling weights the batch priority
    of Riquelme et al. 2021.
    """
    count, k = choice.scores.shape[1], choice.experts.shape[1]
    tokens = len(choice.experts)
    numbers = torch.arange(tokens, device=choice.experts.device)
    kept = choice.experts < count
    if capacity is not None:
        ranked = numbers if order is None else torch.sort(order, stable=True).indices
        wanted = choice.experts[ranked].T.reshape(-1)  # all first choices, then all second ones
        by_expert = torch.sort(wanted, stable=True).indices
        begins = torch.cumsum(tokens_of(wanted, count), 0) - tokens_of(wanted, count)
        place = torch.empty_like(wanted)
        place[by_expert] = torch.arange(len(wanted), device=wanted.device) - begins[wanted[by_expert]]
        kept[ranked] &= (place < capacity).view(k, tokens).T
    flat = kept.reshape(-1).nonzero().squeeze(1)
    experts = choice.experts.reshape(-1)[flat]
    by_expert = torch.sort(experts, stable=True).indices
    chosen = flat[by_expert]
    return Routing(
        torch.div(chosen, k, rounding_mode="floor"),
        choice.weights.reshape(-1)[chosen],
        tokens_of(experts, count),
        torch.tensor(kept.numel(), device=flat.device) - len(flat),
    )


def route_by_experts(scores: Tensor, capacity: int) -> Routing:
    """The pairs where each expert chooses the `capacity` tokens with the highest `scores` (tokens, experts), which are
    the weights: Zhou et al. 2022, "Mixture-of-Experts with Expert Choice Routing", eq. 2. A token may have many
    experts, or none."""
    count = min(capacity, len(scores))
    tokens = torch.sort(best(scores.T, count), dim=1).values
    weights = scores.T.gather(1, tokens)
    counts = torch.full((scores.shape[1],), count, device=scores.device)
    return Routing(tokens.reshape(-1), weights.reshape(-1), counts, torch.zeros((), dtype=torch.int64))
