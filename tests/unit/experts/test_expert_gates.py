"""The gates of mixtures compute what their papers' formulas say, and routing loses nothing that has room."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyaccel.errors import PolyaccelError
from polyaccel.torch.experts import gates
from polyaccel.torch.experts.gates import RoutingDecision
from polyaccel.torch.experts.routing import Routing, capacity_of, chosen_by_experts, kept_choices, route


def drawn(tokens: int, experts: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(row: list[float]) -> list[float]:
    exponents = [math.exp(value) for value in row]
    return [value / sum(exponents) for value in exponents]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def ranked(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda at: (-row[at], at))[:k]


@pytest.mark.parametrize(
    ("k", "normalize"), [(1, False), (2, False), (3, False), (2, True), (3, True), (1, None), (2, None)]
)
def test_softmax_choice(k: int, normalize: bool | None) -> None:
    logits = drawn(7, 5)
    found = gates.softmax_choice(logits, k, normalize=normalize)
    normalize = k > 1 if normalize is None else normalize
    for token, row in enumerate(logits.tolist()):
        scores, experts = softmax(row), ranked(row, k)
        of_all = sum(scores[expert] for expert in experts) if normalize else 1.0
        assert found.experts[token].tolist() == experts
        assert found.weights[token].tolist() == pytest.approx([scores[expert] / of_all for expert in experts])
        if normalize:  # Shazeer et al.: a softmax over the logits that are kept
            assert found.weights[token].tolist() == pytest.approx(softmax([row[expert] for expert in experts]))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (3, 1)])
def test_sigmoid_choice(with_bias: bool, groups: int, kept: int) -> None:
    logits, bias = drawn(9, 12), drawn(1, 12, 1)[0]
    found = gates.sigmoid_choice(
        logits, 3, bias=bias if with_bias else None, groups=groups, kept_groups=kept, scale=2.5
    )
    for token, row in enumerate(logits.tolist()):
        scores = [sigmoid(value) for value in row]
        by = [score + with_bias * more for score, more in zip(scores, bias.tolist(), strict=True)]
        size = 12 // groups
        sums = [sum(sorted(by[begin : begin + size])[-2:]) for begin in range(0, 12, size)]
        allowed = ranked(sums, kept)
        experts = ranked([one if at // size in allowed else -math.inf for at, one in enumerate(by)], 3)
        assert found.experts[token].tolist() == experts
        whole = sum(scores[expert] for expert in experts)
        assert found.weights[token].tolist() == pytest.approx([2.5 * scores[expert] / whole for expert in experts])


def loss_of(scores: Tensor, x: Tensor, experts: Tensor) -> Tensor:
    """The task's loss of Switch Transformers, eq. 2: y = p_i(x) E_i(x) of the best expert, linear ones here."""
    best = scores.detach().argmax(1)
    return (scores.gather(1, best[:, None]) * torch.einsum("tf,tfo->to", x, experts[best])).square().sum()


@pytest.mark.parametrize("gate", ["softmax", "sigmoid", "sigmoid with a bias", "sigmoid in groups"])
def test_one_choice_trains_the_router_by_the_task(gate: str) -> None:
    """Float64 gradients against equation 2 written out."""
    router, x, experts = drawn(6, 4, 1).requires_grad_(), drawn(9, 6, 2), drawn(24, 6, 3).view(4, 6, 6)
    scores = torch.softmax(x @ router, 1) if gate == "softmax" else torch.sigmoid(x @ router)
    (wanted,) = torch.autograd.grad(loss_of(scores, x, experts), router)
    more: dict[str, dict[str, object]] = {
        "sigmoid with a bias": {"bias": torch.zeros(4)},
        "sigmoid in groups": {"groups": 4, "kept_groups": 2},
    }
    if gate == "softmax":
        choice = gates.softmax_choice(x @ router, 1)
    else:
        choice = gates.sigmoid_choice(x @ router, 1, **more.get(gate, {}))  # type: ignore[arg-type]
    out = choice.weights * torch.einsum("tf,tfo->to", x, experts[choice.experts[:, 0]])
    (found,) = torch.autograd.grad(out.square().sum(), router)
    torch.testing.assert_close(found, wanted)
    assert wanted.abs().max() > 1e-3


@pytest.mark.parametrize("choice", [gates.softmax_choice, gates.sigmoid_choice])
def test_a_router_that_would_not_be_trained_is_refused(choice: Callable[..., RoutingDecision]) -> None:
    with pytest.raises(PolyaccelError) as caught:
        choice(drawn(3, 4), 1, normalize=True)
    assert caught.value.value == 1


def test_equal_scores_choose_the_lower_number() -> None:
    assert gates.softmax_choice(torch.zeros(2, 6), 3, normalize=True).experts.tolist() == [[0, 1, 2]] * 2


def test_noisy_logits_are_those_of_shazeer() -> None:
    logits, spread, noise = drawn(4, 3), drawn(4, 3, 1), drawn(4, 3, 2)
    found = gates.noisy_logits(logits, spread, noise)
    for at in range(4):
        for expert in range(3):
            softplus = math.log(1 + math.exp(float(spread[at, expert])))
            expected = float(logits[at, expert]) + float(noise[at, expert]) * softplus
            assert float(found[at, expert]) == pytest.approx(expected)


def test_gumbel_noise_samples_the_softmax() -> None:
    uniform = torch.rand(20_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = torch.tensor([0.5, -1.0, 1.0], dtype=torch.float64)
    best = gates.best(logits + gates.gumbel_noise(uniform), 1)
    shares = torch.bincount(best[:, 0], minlength=3) / len(best)
    torch.testing.assert_close(shares.double(), torch.softmax(logits, 0), atol=0.01, rtol=0)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_balance_loss(k: int, first: bool) -> None:
    choice = gates.softmax_choice(drawn(8, 4), k)
    expected = 0.0
    for expert in range(4):
        counted = choice.experts[:, :1] if first else choice.experts
        share = sum(expert in row for row in counted.tolist()) / 8
        expected += share * sum(row[expert] for row in choice.scores.tolist()) / 8
    assert float(gates.balance_loss(choice, first=first)) == pytest.approx(4 * expected)


def test_z_loss() -> None:
    logits = drawn(6, 5)
    expected = sum(math.log(sum(map(math.exp, row))) ** 2 for row in logits.tolist()) / 6
    assert float(gates.z_loss(logits)) == pytest.approx(expected)


def test_no_tokens_have_losses_of_zero_with_gradients() -> None:
    logits = torch.zeros(0, 4, requires_grad=True)
    choice = gates.softmax_choice(logits, 2, normalize=True)
    loss = gates.balance_loss(choice) + gates.z_loss(logits)
    loss.backward()
    assert (float(loss.detach()), logits.grad is not None) == (0.0, True)
    assert kept_choices(choice.experts, 4, 4).shape == (0, 2)
    assert len(route(choice.experts, choice.weights, 4).tokens) == 0


def test_the_bias_follows_the_sign_of_the_load() -> None:
    assert gates.load_direction(torch.tensor([5, 3, 3, 1])).tolist() == [-1, 0, 0, 1]


@pytest.mark.parametrize(
    ("tokens", "k", "factor", "least", "expected"), [(16, 1, 1.0, 1, 4), (10, 2, 1.5, 4, 8), (3, 1, 1.0, 4, 4)]
)
def test_capacity(tokens: int, k: int, factor: float, least: int, expected: int) -> None:
    assert capacity_of(tokens, 4, k, factor, least) == expected


@st.composite
def choices(draw: st.DrawFn) -> RoutingDecision:
    """Any routing: experts without tokens, over-full ones, no tokens at all."""
    experts = draw(st.integers(1, 6))
    k = draw(st.integers(1, experts))
    rows = draw(st.lists(st.permutations(range(experts)), max_size=12))
    chosen = torch.tensor([row[:k] for row in rows], dtype=torch.int64).reshape(len(rows), k)
    return RoutingDecision(chosen, torch.rand(len(rows), k, dtype=torch.float64), torch.zeros(len(rows), experts))


def pairs(routing: Routing) -> list[tuple[int, int, float]]:
    routing = routing.keep(int(routing.counts.sum()))
    experts = torch.repeat_interleave(torch.arange(len(routing.counts)), routing.counts)
    return list(zip(experts.tolist(), routing.tokens.tolist(), routing.weights.tolist(), strict=True))


@given(choices())
def test_without_a_capacity_every_choice_is_a_pair(choice: RoutingDecision) -> None:
    expected = sorted(
        (int(choice.experts[token, at]), token, float(choice.weights[token, at]))
        for token in range(len(choice.experts))
        for at in range(choice.experts.shape[1])
    )
    assert pairs(route(choice.experts, choice.weights, choice.scores.shape[1])) == expected


@given(choices(), st.integers(0, 6), st.integers(0, 3))
def test_numbers_past_the_last_are_none(choice: RoutingDecision, count: int, more: int) -> None:
    experts = choice.experts + more * (choice.experts >= count)
    expected = sorted(
        (int(experts[token, at]), token, float(choice.weights[token, at]))
        for token in range(len(experts))
        for at in range(experts.shape[1])
        if experts[token, at] < count
    )
    assert pairs(route(experts, choice.weights, count)) == expected
    assert gates.tokens_of(experts, count).tolist() == [
        sum(one[0] == expert for one in expected) for expert in range(count)
    ]
    assert torch.equal(kept_choices(experts, count, len(experts)), experts < count)


@given(choices(), st.integers(0, 5), st.booleans(), st.integers(0, 2**31))
def test_experts_take_first_choices_first(choice: RoutingDecision, capacity: int, shuffled: bool, seed: int) -> None:
    """Against a loop over choices, then tokens in their order."""
    tokens = len(choice.experts)
    order = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) if shuffled else None
    numbers = range(tokens) if order is None else sorted(range(tokens), key=order.tolist().__getitem__)
    full: Counter[int] = Counter()
    taken = set()
    for at in range(choice.experts.shape[1]):
        for token in numbers:
            expert = int(choice.experts[token, at])
            if full[expert] < capacity:
                full[expert] += 1
                taken.add((token, at))
    kept = kept_choices(choice.experts, choice.scores.shape[1], capacity, order)
    assert {(token, at) for token, at in kept.nonzero().tolist()} == taken


@pytest.mark.parametrize("capacity", [0, 2, 9])
def test_experts_choose_their_best_tokens(capacity: int) -> None:
    scores = torch.softmax(drawn(6, 4), 1)
    expected = {(token, expert) for expert in range(4) for token in ranked(scores[:, expert].tolist(), capacity)}
    assert {(token, expert) for token, expert in chosen_by_experts(scores, capacity).nonzero().tolist()} == expected
