"""DeepSpeed's gates: which experts a token goes to, and with what weight, by the number of choices.

One choice is Switch Transformers' (an expert that is full takes tokens at random), two are GShard's, more are what
DeepSpeed calls top-k: a full expert takes the tokens that want it most. Weights are divided by the sum of those that
count, after tokens were dropped. Numbers that are drawn are drawn as DeepSpeed draws them, so that the same seed
chooses the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Gumbel, Uniform
from torch.nn import functional

from polyaccel.errors import PolyaccelError
from polyaccel.torch.experts.gates import softmax_choice, tokens_of
from polyaccel.torch.experts.routing import chosen_by_experts, kept_choices


class Routes(NamedTuple):
    """The choices of tokens."""

    loss: Tensor
    """How uneven they are, without dims: the gate's loss."""
    capacity: Tensor
    """How many tokens an expert takes, int64 without dims."""
    experts: Tensor
    """(tokens, k), int64, the best first."""
    weights: Tensor
    """(tokens, k), zeros where a choice does not count."""
    kept: Tensor
    """(tokens, k), bool: which choices count."""
    counts: Tensor
    """(experts,), int64: how often each expert was chosen."""

    def places(self, *, by_choice: bool) -> Tensor:
        """(tokens, k), int64: where each kept choice stands in its expert's part of a buffer, by the tokens' order;
        with `by_choice` all first choices before all second ones. Others stand at 0."""
        (tokens, k), count = self.experts.shape, len(self.counts)
        chosen = functional.one_hot(self.experts, len(self.counts)) * self.kept.unsqueeze(2)
        before = chosen.transpose(0, 1).reshape(k * tokens, count) if by_choice else chosen.sum(1)
        place = before.cumsum(0) - 1
        place = place.view(k, tokens, count).transpose(0, 1) if by_choice else place.unsqueeze(1).expand_as(chosen)
        return place.gather(2, self.experts.unsqueeze(2)).squeeze(2) * self.kept

    def sparse(self, *, by_choice: bool) -> tuple[Any, ...]:
        """Loss, capacity, number of experts; then (k, tokens) of experts, -1 for choices that do not count, places and
        weights; then counts."""
        experts = self.experts.masked_fill(~self.kept, -1)
        routes = (experts.T.contiguous().int(), self.places(by_choice=by_choice).T.contiguous().int())
        return self.loss, self.capacity, len(self.counts), *routes, self.weights.T.contiguous(), self.counts

    def dense(self, *, by_choice: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss; weights (tokens, experts, capacity); where they are not zero; counts."""
        token, choice = self.kept.nonzero(as_tuple=True)
        where = token, self.experts[token, choice], self.places(by_choice=by_choice)[token, choice]
        shape = (len(self.experts), len(self.counts), int(self.capacity))
        weights = self.weights.new_zeros(shape).index_put(where, self.weights[token, choice])
        return self.loss, weights, weights.bool(), self.counts


def one_choice(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None,
    noisy_gate_policy: str | None,
    drop_tokens: bool,
    use_rts: bool,
) -> Routes:
    """The expert with the highest probability, or a sample of them (`RSample`), for tokens that are in `used_token`
    (tokens,)."""
    by = logits + gumbel_rsample(logits.shape, logits.device) if noisy_gate_policy == "RSample" else None
    choice = softmax_choice(logits, 1, normalize=False, by=by)
    count = logits.shape[1]
    wanted = choice.experts
    if used_token is not None:
        wanted = wanted.masked_fill(~used_token.reshape(-1, 1).bool(), count)
    counts = tokens_of(wanted, count)
    if not drop_tokens:
        capacity, kept = counts.max(), kept_choices(wanted, count)
    else:
        capacity, order = _capacity(logits, capacity_factor, min_capacity), None
        if use_rts:
            drawn = torch.rand_like(logits)
            order = -drawn.gather(1, choice.experts).squeeze(1)
        kept = kept_choices(wanted, count, int(capacity), order)
    loss = _balance(choice.scores, counts)
    return Routes(loss, capacity, choice.experts, choice.weights * kept, kept, counts)


def two_choices(
    logits: Tensor, capacity_factor: float, min_capacity: int, drop_tokens: bool, top2_2nd_expert_sampling: bool
) -> Routes:
    """The expert with the highest probability and another: a sample, or the one with the next highest."""
    scores, count = torch.softmax(logits, dim=1), logits.shape[1]
    first = scores.argmax(1, keepdim=True)
    by = logits + gumbel_rsample(logits.shape, logits.device) if top2_2nd_expert_sampling else logits
    second = by.detach().scatter(1, first, -torch.inf).argmax(1, keepdim=True)
    experts = torch.cat((first, second), dim=1)
    counts = tokens_of(experts, count)
    if drop_tokens:
        capacity = _capacity(logits, 2 * capacity_factor, min_capacity)
        kept = kept_choices(experts, count, int(capacity))
    else:
        capacity, kept = counts.max(), torch.ones_like(experts, dtype=torch.bool)
    loss = _balance(scores, tokens_of(first, count))
    return Routes(loss, capacity, experts, _shared(scores.gather(1, experts) * kept), kept, counts)


def many_choices(
    logits: Tensor, k: int, capacity_factor: float, min_capacity: int, drop_tokens: bool, drop_policy: str
) -> Routes:
    """The `k` experts with the highest probabilities. A full expert takes the tokens with the highest ones
    (`drop_policy` "probs") or the first ("position"). Raises PolyaccelError for another policy."""
    choice, count = softmax_choice(logits, k, normalize=False), logits.shape[1]
    counts = tokens_of(choice.experts, count)
    chosen = torch.zeros_like(choice.scores, dtype=torch.bool).scatter_(1, choice.experts, True)
    if not drop_tokens:
        capacity, kept = counts.max(), torch.ones_like(choice.experts, dtype=torch.bool)
    else:
        capacity = _capacity(logits, k * capacity_factor, min_capacity)
        if drop_policy == "probs":
            taken = chosen_by_experts(choice.scores.detach().masked_fill(~chosen, 0.0), int(capacity))
        elif drop_policy == "position":
            taken = chosen.cumsum(0) <= capacity
        else:
            raise PolyaccelError(f"drop_policy {drop_policy!r}", hint='use "probs" or "position"', value=drop_policy)
        kept = taken.gather(1, choice.experts)
    loss = _balance(choice.scores, counts) / k
    return Routes(loss, capacity, choice.experts, _shared(choice.weights * kept), kept, counts)


def gumbel_rsample(shape: Any, device: torch.device) -> Tensor:
    """Numbers of the Gumbel distribution: the highest of logits plus these is a sample of their softmax."""
    zero, one = torch.zeros((), device=device), torch.ones((), device=device)
    drawn: Tensor = Gumbel(zero, one, validate_args=False).sample(shape)  # type: ignore[no-untyped-call]
    return drawn


def multiplicative_jitter(x: Tensor, device: torch.device, epsilon: float = 1e-2) -> Tensor:
    """`x` times numbers between 1 - `epsilon` and 1 + `epsilon` (Switch Transformers, 2.4)."""
    if epsilon == 0:
        return x
    low, high = (torch.tensor(1.0 + sign * epsilon, device=device) for sign in (-1, 1))
    return x * Uniform(low, high, validate_args=False).sample(x.shape)


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Any = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> tuple[Any, ...]:
    """One choice: loss, weights (tokens, experts, capacity), where they are, and tokens an expert. Other ranks of
    `ep_group` need not have the same capacity."""
    routes = one_choice(logits, capacity_factor, min_capacity, used_token, noisy_gate_policy, drop_tokens, use_rts)
    return routes.sparse(by_choice=True) if sparse_routes else routes.dense(by_choice=True)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Two choices, as `top1gating`."""
    routes = two_choices(logits, capacity_factor, min_capacity, drop_tokens, top2_2nd_expert_sampling)
    return routes.sparse(by_choice=True) if sparse_routes else routes.dense(by_choice=True)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """`k` choices, as `top1gating`."""
    routes = many_choices(logits, k, capacity_factor, min_capacity, drop_tokens, drop_policy)
    return routes.sparse(by_choice=False) if sparse_routes else routes.dense(by_choice=False)


class _PreciseLinear(nn.Linear):
    """A linear layer that computes in float32, whatever type its weight has."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear has it
        return functional.linear(input.float(), self.weight.float())


class TopKGate(nn.Module):
    """A router and the gate for its `k`."""

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        self.wg = _PreciseLinear(model_dim, num_experts, bias=False)
        self.ep_group, self.k = ep_group, k
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity, self.noisy_gate_policy = min_capacity, noisy_gate_policy
        self.drop_tokens, self.use_rts = drop_tokens, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(
        self,
        input: Tensor,  # noqa: A002 - as DeepSpeed has it
        used_token: Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
    ) -> tuple[Any, ...]:
        """What the gate makes of `input` (tokens, features), as the functions above. Only one choice heeds
        `used_token`, as in DeepSpeed."""
        tokens = input.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            tokens = multiplicative_jitter(tokens, input.device)
        logits = self.wg(tokens)
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        room = factor, self.min_capacity
        if self.k == 1:
            noise = self.noisy_gate_policy if self.training else None
            routes = one_choice(logits, *room, used_token, noise, self.drop_tokens, self.use_rts)
        elif self.k == 2:
            routes = two_choices(logits, *room, self.drop_tokens, self.top2_2nd_expert_sampling)
        else:
            routes = many_choices(logits, self.k, *room, self.drop_tokens, "probs")
        by_choice = self.k <= 2
        return routes.sparse(by_choice=by_choice) if sparse_routes else routes.dense(by_choice=by_choice)


def _capacity(logits: Tensor, factor: float, least: int) -> Tensor:
    """An expert's even share of the tokens times `factor`, rounded up in float32, at least `least`."""
    tokens, experts = logits.shape
    room = torch.ceil(tokens / experts * torch.tensor(factor)).to(torch.int64)
    return torch.clamp(room, min=least)


def _balance(scores: Tensor, counts: Tensor) -> Tensor:
    """Experts x sum of (share of the tokens that choose one) x (its mean score); 0 of no tokens."""
    if not len(scores):
        return scores.sum()
    return len(counts) * (scores.mean(0) * counts.to(scores.dtype) / len(scores)).sum()


def _shared(weights: Tensor) -> Tensor:
    """`weights` (tokens, k) divided by their sums, which are taken as no less than the type's precision."""
    return weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
