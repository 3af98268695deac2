"""Whatever tokens choose, spread experts compute and learn what they do on one rank, and nobody waits for ever."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity_models import make_config
from torch import Tensor, nn

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.experts.models import spread_experts

WIDTH = 6


class Experts(nn.Module):
    """Experts as those of transformers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) / 2)
        self.bias = nn.Parameter(torch.randn(count, WIDTH) / 2)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert < self.num_experts:
                token, place = (top_k_index == expert).nonzero(as_tuple=True)
                inner = torch.tanh(hidden_states[token] @ self.up[expert].T)
                found = inner @ self.down[expert].T + self.bias[expert]
                out = out.index_add(0, token, found * top_k_weights[token, place, None])
        return out


class Mixture(nn.Module):
    """Layers around experts that are told what tokens choose."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.first = Experts(count)
        self.second = Experts(count)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        x = self.before(x)
        x = x + self.first(x, chosen, weights)
        x = x + self.second(x, chosen.flip(0), weights)
        return self.after(x).square().mean()


def made(count: int) -> Mixture:
    torch.manual_seed(3)
    return Mixture(count)


def batch(chosen: list[list[int]], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    index = torch.tensor(chosen)
    x = torch.randn(len(chosen), WIDTH, generator=generator)
    return x, index, torch.rand(index.shape, generator=generator) + 0.1


def config_of(stage: int, experts: int, **changes: Any) -> dict[str, Any]:
    return make_config(
        stage,
        zero={"reduce_bucket_size": 60, "stage3_param_persistence_threshold": 10},
        optimizer={"type": "SGD", "params": {"lr": 0.05}},
        expert_parallel={"enabled": True, "autoep_size": experts},
        **changes,
    )


def trained_plainly(model: nn.Module, batches: list[list[list[list[int]]]]) -> tuple[list[list[float]], dict[str, Any]]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for step, of_ranks in enumerate(batches):
        optimizer.zero_grad()
        losses.append([])
        for rank, chosen in enumerate(of_ranks):
            loss = model(*batch(chosen, 10 * step + rank))
            (loss / len(of_ranks)).backward()
            losses[-1].append(loss.item())
        optimizer.step()
    return losses, model.state_dict()


def assert_trains(
    model: nn.Module, stage: int, experts: int, batches: list[list[list[list[int]]]], **changes: Any
) -> None:
    """Ranks with `batches[step][rank]`, what each token chooses, against plain torch."""
    losses, values = trained_plainly(model, batches)
    ranks = len(batches[0])
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def train(communicator: Communicator) -> tuple[list[float], dict[str, Any]]:
        engine, *_ = polyaccel.initialize(model=copies[communicator.rank], config=config_of(stage, experts, **changes))
        found = []
        for step, of_ranks in enumerate(batches):
            loss = engine(*batch(of_ranks[communicator.rank], 10 * step + communicator.rank))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        state = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return found, state

    for rank, (found, state) in enumerate(run_threads(ranks, train)):
        assert found == pytest.approx([each[rank] for each in losses], rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, int, list[list[list[list[int]]]]]:
    """Experts, ranks that share them, and two steps of what each rank's tokens choose: any expert may get all tokens or
    none, and a number past the last expert is none."""
    ranks = draw(st.sampled_from([2, 3]))
    count = draw(st.integers(ranks, 5))
    k = draw(st.integers(1, 2))
    token = st.lists(st.integers(0, count), min_size=k, max_size=k, unique=True)
    rank = st.lists(token, min_size=1, max_size=7)
    step = st.lists(rank, min_size=ranks, max_size=ranks)
    return count, ranks, draw(st.lists(step, min_size=2, max_size=2))


@settings(max_examples=12)
@given(routings(), st.integers(0, 3))
def test_any_routing(drawn: tuple[int, int, list[list[list[list[int]]]]], stage: int) -> None:
    count, ranks, batches = drawn
    assert_trains(made(count), stage, ranks, batches)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_that_no_token_reaches_stop_nobody(stage: int) -> None:
    """On rank 1 alone, on the ranks that have the same experts, then on all ranks."""
    one, other, none = [[0], [0], [1]], [[2], [3]], [[4], [4]]
    assert_trains(made(4), stage, 2, [[one, one, other, one], [one, one, one, one], [none, none, none, none]])


@pytest.mark.parametrize("frozen", ["first", "before", "before first", "first second"])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_frozen_stays_and_stops_nobody(stage: int, frozen: str) -> None:
    model = made(3)
    for name in frozen.split():
        getattr(model, name).requires_grad_(False)
    assert_trains(model, stage, 2, [[[[0], [1]], [[0], [0]]], [[[2], [2]], [[2], [1]]]])


def test_backward_passes_that_compute_again_travel_again() -> None:
    batches = [[[[0, 1], [1, 2]], [[0, 2], [0, 1]]]] * 2
    recompute = {"activation_checkpointing": {"enabled": True, "blocks": ["Experts", "SpreadExperts"]}}
    assert_trains(made(3), 3, 2, batches, **recompute)


def test_a_rank_has_no_tokens_at_all() -> None:
    torch.manual_seed(4)
    alone = Experts(4)
    x, chosen, weights = batch([[0, 3], [2, 1], [3, 0]], 7)
    copies = [copy.deepcopy(alone) for _ in range(2)]
    alone(x, chosen, weights).square().sum().backward()

    def run(communicator: Communicator) -> tuple[Tensor, Any]:
        mine = copies[communicator.rank]
        spread_experts(mine, communicator)
        count = 0 if communicator.rank else len(x)
        given = x[:count].clone().requires_grad_()
        out = mine(given, chosen[:count], weights[:count])
        out.square().sum().backward()
        return out.detach(), mine.up.grad

    (out, first), (nothing, second) = run_threads(2, run)
    assert nothing.shape == (0, WIDTH)
    torch.testing.assert_close(out, alone(x, chosen, weights).detach())
    torch.testing.assert_close(2 * torch.cat([first, second]), alone.up.grad)
