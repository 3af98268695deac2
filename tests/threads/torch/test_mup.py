"""Optimizers of muP by config: the rates and decays of the paper's table, on ranks that share states out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads

WIDER = 4.0
STEPS = 3
KINDS = {
    "MuAdam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1}),
    "MuAdamW": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1}),
    "MuSGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
}


def shape(ninf, width=WIDER, ratio=WIDER / 2):
    """As `mup.set_base_shapes` leaves it."""
    return SimpleNamespace(ninf=lambda: ninf, width_mult=lambda: width, fanin_fanout_mult_ratio=lambda: ratio)


def build():
    """Inputs that do not grow, a matrix that does along both sides, and an output that does along one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    growing = {"0.weight": 1, "0.bias": 1, "2.weight": 2, "2.bias": 1, "4.weight": 1, "4.bias": 0}
    for name, parameter in model.named_parameters():
        parameter.infshape = shape(growing[name])
    return model


def scales(kind, name):
    """What `mup` multiplies the rate of a parameter by."""
    if name == "2.weight":
        return 2 / WIDER if kind == "MuSGD" else 1 / WIDER
    return WIDER if kind == "MuSGD" and name != "4.bias" else 1.0


def data(step, rank):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def plainly(kind, decoupled):
    model, (optimizer, params) = build(), KINDS[kind]
    groups = []
    for name, parameter in model.named_parameters():
        scale = scales(kind, name)
        decay = params["weight_decay"] if decoupled else params["weight_decay"] / scale
        groups.append({"params": [parameter], "lr": params["lr"] * scale, "weight_decay": decay})
    plain = optimizer(groups, **params)
    for step in range(STEPS):
        plain.zero_grad()
        for rank in range(2):
            (model(data(step, rank)).square().mean() / 2).backward()
        plain.step()
    return model.state_dict()


@pytest.mark.parametrize(("kind", "stage"), [("MuAdam", 2), ("MuAdamW", 3), ("MuSGD", 1)])
@pytest.mark.parametrize("decoupled", [False, True])
def test_rates_follow_widths(kind, stage, decoupled):
    models = [build() for _ in range(2)]
    params = KINDS[kind][1] | {"decoupled_wd": decoupled}

    def go(communicator):
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": kind.lower(), "params": params},
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = polyaccel.initialize(model=models[communicator.rank], config=config)
        for step in range(STEPS):
            engine.backward(engine(data(step, communicator.rank)).square().mean())
            engine.step()
        found = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return found

    wanted = plainly(kind, decoupled)
    for found in run_threads(2, go):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("growing", [None, 3])
def test_parameters_without_a_width_are_refused(growing):
    def go(_):
        model = build()
        model[0].weight.infshape = None if growing is None else shape(growing)
        with pytest.raises(ConfigError) as caught:
            polyaccel.initialize(model=model, config={"train_batch_size": 4, "optimizer": {"type": "MuAdam"}})
        assert caught.value.problems[0].key == "optimizer.type"
        assert "0.weight" in caught.value.problems[0].expected

    run_threads(1, go)
