"""The layer of experts for models of one's own: what it computes, and the same over ranks."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from parity_models import make_config
from torch import Tensor, nn

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.errors import PolyaccelError
from polyaccel.ops import matmul_autotune
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.experts import Mixture, balance_experts
from polyaccel.torch.experts.gates import load_direction
from polyaccel.torch.experts.layer import StackedExperts

WIDTH = 8
SETTINGS: dict[str, dict[str, Any]] = {
    "top 1": {"k": 1},
    "top 1 with room": {"k": 1, "capacity_factor": 1.0, "min_capacity": 1},
    "top 1 by sigmoid": {"k": 1, "gate": "sigmoid", "balance_weight": 0.0},
    "top 2": {"k": 2, "z_weight": 0.01},
    "capacity": {"k": 2, "capacity_factor": 1.0, "min_capacity": 1},
    "sigmoid": {"k": 2, "gate": "sigmoid", "scale": 2.0, "bias_rate": 0.01, "balance_weight": 0.0},
    "expert choice": {"gate": "expert choice", "capacity_factor": 1.5, "balance_weight": 0.0},
}


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))


class Model(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture(WIDTH, expert, 5, **settings)
        self.after = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        found = self.mixture(x)
        return self.after(x + found.output).square().mean() + found.loss


def made(**settings: Any) -> Model:
    torch.manual_seed(1)
    return Model(**settings)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def test_each_token_gets_its_experts_times_their_weights() -> None:
    torch.manual_seed(0)
    alone = [expert() for _ in range(3)]
    stacked = StackedExperts(iter(alone).__next__, 3)
    x, index, weights = torch.randn(4, WIDTH), torch.tensor([[0, 2], [2, 1], [3, 0], [3, 3]]), torch.rand(4, 2)
    found = stacked(x, index, weights)
    for token in range(4):
        wanted = torch.zeros(WIDTH)
        for at in range(2):
            if int(index[token, at]) < 3:
                wanted = wanted + weights[token, at] * alone[int(index[token, at])](x[token])
        torch.testing.assert_close(found[token], wanted)
    assert {name for name, _ in stacked.named_parameters()} == {"0_weight", "0_bias", "2_weight", "2_bias"}


@pytest.mark.parametrize("name", sorted(SETTINGS))
@pytest.mark.parametrize(("experts", "data", "stage"), [(2, 1, 1), (3, 1, 3), (2, 2, 2)])
def test_ranks_that_share_experts_train_what_plain_torch_trains(
    name: str, experts: int, data: int, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(matmul_autotune.VARIABLE, "off" if stage == 2 else "on")
    model, ranks = made(**SETTINGS[name]), experts * data
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses: list[list[float]] = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append([])
        for rank in range(ranks):
            loss = plain(batch(step, rank))
            (loss / ranks).backward()
            losses[-1].append(loss.item())
        optimizer.step()
        if (load := plain.mixture.load) is not None:
            plain.mixture.raised += load_direction(load)
            plain.mixture.load = None
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    config = make_config(
        stage,
        zero={"reduce_bucket_size": 100, "stage3_param_persistence_threshold": 10},
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
        expert_parallel={"enabled": True, "autoep_size": experts},
    )

    def train(communicator: Communicator) -> tuple[list[float], dict[str, Tensor]]:
        engine, *_ = polyaccel.initialize(model=copies[communicator.rank], config=config)
        found = []
        for step in range(3):
            loss = engine(batch(step, communicator.rank))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        state = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return found, state

    for rank, (found, state) in enumerate(run_threads(ranks, train)):
        assert found == pytest.approx([each[rank] for each in losses], rel=1e-5)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)
    assert name != "sigmoid" or bool(plain.mixture.raised.any())


@pytest.mark.parametrize("noise", ["learned", "sample", "jitter"])
def test_noise_is_of_training_alone(noise: Any) -> None:
    model = made(noise=noise)
    torch.manual_seed(5)
    first, second = model(batch(0, 0)), model(batch(0, 0))
    assert not torch.equal(first, second)
    first.backward()
    assert all(parameter.grad is not None for parameter in model.mixture.parameters())
    model.eval()
    assert torch.equal(model(batch(0, 0)), model(batch(0, 0)))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gate": "sigmoid"},
        {"capacity_factor": 1.0, "min_capacity": 1},
        {"gate": "sigmoid", "bias_rate": 0.1},
        {"noise": "sample"},
        {"gate": "expert choice", "capacity_factor": 1.0},
    ],
    ids=["softmax", "sigmoid", "capacity", "bias", "sample", "expert choice"],
)
def test_one_choice_trains_the_router_by_the_task(settings: dict[str, Any]) -> None:
    """Against Switch Transformers, eq. 2: each kept choice's output is its score times what the expert makes."""
    torch.manual_seed(0)
    layer, x = Mixture(WIDTH, expert, 4, k=1, balance_weight=0.0, **settings), torch.randn(20, WIDTH)
    chosen: list[tuple[Tensor, Tensor]] = []
    layer.experts.register_forward_pre_hook(lambda _, args: chosen.append((args[1], args[2])))
    layer(x).output.square().sum().backward()
    found, logits = layer.router.weight.grad.clone(), layer.router(x)
    scores = torch.sigmoid(logits) if settings.get("gate") == "sigmoid" else torch.softmax(logits, 1)
    index, _ = chosen[0]
    kept = index < 4
    weights = scores.gather(1, index.masked_fill(~kept, 0)) * kept
    layer.router.weight.grad = None
    layer.experts(x, index, weights).square().sum().backward()
    torch.testing.assert_close(found, layer.router.weight.grad)
    assert found.abs().max() > 1e-3


def test_what_is_dropped_is_told() -> None:
    model = made(k=1, capacity_factor=0.5, eval_capacity_factor=8.0, min_capacity=1, drops_at_random=True)
    x = batch(0, 0)
    found = model.mixture(x)
    assert int(found.tokens.sum()) == 12
    assert int(found.dropped) == int((found.tokens - 2).clamp(min=0).sum()) > 0
    untouched = (found.output.view(12, WIDTH) == 0).all(1)
    assert int(untouched.sum()) == int(found.dropped)
    model.eval()
    assert int(model.mixture(x).dropped) == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"k": 6}, "6"),
        ({"gate": "expert choice"}, "capacity_factor"),
        ({"bias_rate": 0.1}, "'softmax'"),
        ({"k": 1, "normalize": True}, "normalize=True"),
        ({"k": 1, "normalize": True, "gate": "sigmoid"}, "normalize=True"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(PolyaccelError) as caught:
        made(**settings)
    assert named in str(caught.value)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        settings: dict[str, Any] = {"gate": "sigmoid", "bias_rate": 0.01, "balance_weight": 0.0}
        self.mixtures = nn.ModuleList(Mixture(WIDTH, expert, 4, **settings) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.half()
        for mixture in self.mixtures:
            x = x + mixture(x).output
        return x.float().square().mean()


def test_biases_follow_updates_alone_and_all_layers_by_one_exchange() -> None:
    """Not frozen layers, nor evaluation, nor a step that is skipped because gradients overflowed."""
    torch.manual_seed(0)
    model = TwoLayers()
    copies = [copy.deepcopy(model) for _ in range(2)]
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 24, "hysteresis": 1}

    def train(communicator: Communicator) -> Any:
        mine = copies[communicator.rank]
        engine, *_ = polyaccel.initialize(model=mine, config=make_config(1, gradient_accumulation_steps=2, fp16=fp16))
        raised = [[mixture.raised.clone() for mixture in mine.mixtures]]
        exchanges, applied = [], []
        real = communicator.all_reduce

        def counted(*args: Any, **named: Any) -> Any:
            exchanges.append(named.get("label"))
            return real(*args, **named)

        communicator.all_reduce = counted  # type: ignore[method-assign]
        for turn in range(30):
            if turn == 26:
                mine.mixtures[0].requires_grad_(False)
            if turn == 28:
                engine.eval()
                engine(batch(turn, communicator.rank))
                with torch.no_grad():
                    engine.train()
                    engine(batch(turn, communicator.rank))
            engine.backward(engine(batch(turn, communicator.rank)))
            engine.step()
            if turn % 2:
                applied.append(engine.was_step_applied())
                raised.append([mixture.raised.clone() for mixture in mine.mixtures])
                assert exchanges.count("tokens of experts") == sum(applied)
                assert all(mixture.load is None for mixture in mine.mixtures)
        balance_experts(mine, communicator)
        assert all(map(torch.equal, raised[-1], [mixture.raised for mixture in mine.mixtures]))
        engine.destroy()
        return raised, applied

    (raised, applied), (others, _) = run_threads(2, train)
    assert [one.tolist() for each in raised for one in each] == [one.tolist() for each in others for one in each]
    assert set(applied) == {True, False}
    steps = [[after - before for before, after in zip(*pair, strict=True)] for pair in pairwise(raised)]
    moved = [[bool(step.any()) for step in each] for each in steps]
    assert all(not any(each) for each, went in zip(moved, applied, strict=True) if not went)
    assert any(each[0] for each in moved[:13])
    assert not any(each[0] for each in moved[13:])
    assert {int(step.abs().max()) for each in steps for step in each} == {0, 1}
