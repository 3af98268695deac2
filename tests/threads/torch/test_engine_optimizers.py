"""Optimizers by config against plain torch, or against their papers written out, at every stage and world size."""

from __future__ import annotations

import pytest
import torch
from parity_models import (
    SMALL,
    assert_bitwise,
    assert_close,
    make_config,
    on_threads,
    parity_model,
    train_on_threads,
    train_plainly,
)

import polyaccel
from polyaccel.errors import ConfigError

STEPS = 3


class PlainLion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2, with decoupled decay."""

    def __init__(self, groups, lr, betas, weight_decay=0.0):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                direction = torch.sign(average * beta1 + parameter.grad * (1 - beta1))
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction)
                average.mul_(beta2).add_(parameter.grad * (1 - beta2))


class PlainLamb(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2: one trust ratio a parameter, from norms over all of it, within bounds."""

    def __init__(self, groups, lr, low, high, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.low, self.high = low, high
        self.ratios: set[float] = set()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
                state["step"] += 1
                state["mean"].mul_(beta1).add_(parameter.grad * (1 - beta1))
                state["square"].mul_(beta2).add_(parameter.grad**2 * (1 - beta2))
                mean = state["mean"] / (1 - beta1 ** state["step"])
                square = state["square"] / (1 - beta2 ** state["step"])
                direction = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * parameter
                weight, update = parameter.norm().item(), direction.norm().item()
                ratio = min(max(weight / update, self.low), self.high) if weight and update else 1.0
                self.ratios.add(ratio)
                parameter.sub_(group["lr"] * ratio * direction)


TORCH = torch.optim
CASES = {
    "adam, decoupled": ("Adam", {"lr": 1e-2}, lambda groups: TORCH.AdamW(groups, lr=1e-2)),
    "adam, L2": ("adam", {"lr": 1e-2, "adam_w_mode": False}, lambda groups: TORCH.Adam(groups, lr=1e-2)),
    "adamw": (
        "AdamW",
        {"lr": 1e-2, "betas": [0.8, 0.95], "eps": 1e-6},
        lambda groups: TORCH.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-6),
    ),
    "sgd": ("SGD", {"lr": 0.1}, lambda groups: TORCH.SGD(groups, lr=0.1)),
    "sgd, momentum": (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1},
        lambda groups: TORCH.SGD(groups, lr=0.1, momentum=0.9, dampening=0.1),
    ),
    "sgd, nesterov": (
        "sgd",
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        lambda groups: TORCH.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "adagrad": (
        "Adagrad",
        {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.2},
        lambda groups: TORCH.Adagrad(groups, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.2),
    ),
    "lion": ("Lion", {"lr": 1e-2, "betas": [0.9, 0.99]}, lambda groups: PlainLion(groups, 1e-2, (0.9, 0.99))),
    "lamb": (
        "Lamb",
        {"lr": 1e-2, "min_coeff": 0.3, "max_coeff": 2.0},
        lambda groups: PlainLamb(groups, 1e-2, 0.3, 2.0),
    ),
    "torch's RMSprop by name": (
        "RMSprop",
        {"lr": 1e-2, "momentum": 0.5},
        lambda groups: TORCH.RMSprop(groups, lr=1e-2, momentum=0.5),
    ),
    "torch's NAdam by name": ("NAdam", {"lr": 1e-2}, lambda groups: TORCH.NAdam(groups, lr=1e-2)),
}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("kind", "params", "plain"), CASES.values(), ids=CASES)
def test_optimizers_by_config(world, kind, params, plain):
    """Two groups with decays and rates of their own, clipping, and parameters cut over ranks."""
    optimizer = {"type": kind, "params": params}
    runs = [
        train_on_threads(world, make_config(stage, zero=SMALL, gradient_clipping=1.0, optimizer=optimizer), STEPS)
        for stage in (0, 1, 2)
    ]
    wanted = train_plainly(world, STEPS, clip=1.0, make_optimizer=plain)
    for run in runs:
        assert_close(run.params, wanted.params, 3e-6)
        assert run.norms == pytest.approx(wanted.norms, rel=1e-5)
    if kind not in ("RMSprop", "NAdam"):  # torch's own kernels round differently at the end of a slice
        assert_bitwise(runs[1].params, runs[0].params)
        assert_bitwise(runs[2].params, runs[0].params)


def test_the_lamb_case_sees_bounded_and_free_ratios():
    """Else the comparison above would not notice a wrong norm."""
    lambs = []

    def keep(groups):
        lambs.append(PlainLamb(groups, 1e-2, 0.3, 2.0))
        return lambs[0]

    train_plainly(2, STEPS, make_optimizer=keep)
    ratios = lambs[0].ratios
    assert {0.3, 2.0} & ratios
    assert sum(0.3 < ratio < 2.0 and ratio != 1.0 for ratio in ratios) > 5


@pytest.mark.parametrize("kind", ["Lamb", "Lion", "SGD"])
def test_bf16_masters_follow_the_optimizer(kind):
    """With 16-bit parameters all stages still agree bitwise: the masters are cut, not the arithmetic."""
    optimizer = {"type": kind, "params": {"lr": 1e-2}}
    config = {"zero": SMALL, "optimizer": optimizer, "bf16": {"enabled": True}}
    runs = [train_on_threads(3, make_config(stage, **config), STEPS) for stage in (0, 1, 2)]
    assert_bitwise(runs[1].params, runs[0].params)
    assert_bitwise(runs[2].params, runs[0].params)


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        ({"type": "Adan"}, '"Adan"'),
        ({"type": "Optimizer"}, '"Optimizer"'),
        ({"type": "RMSprop", "params": {"momentun": 1}}, "RMSprop"),
        ({"type": "RMSprop", "params": {"lr": -1.0}}, "RMSprop"),
    ],
    ids=["unknown", "abstract", "misspelt", "negative"],
)
def test_an_optimizer_that_cannot_be_built(optimizer, named: str):
    def build(communicator, module):
        polyaccel.initialize(model=module, config=make_config(0, optimizer=optimizer))

    with pytest.raises(ConfigError) as caught:
        on_threads(1, build, parity_model)
    assert named in str(caught.value)


IN_FLOAT64 = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "Adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-2),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", IN_FLOAT64)
def test_a_model_in_float64_has_its_states_in_float64(kind, stage):
    """A state in float32 is off by 1e-9 after three steps."""

    def in_float64():
        return parity_model().double()

    config = make_config(stage, zero=SMALL, optimizer={"type": kind, "params": {"lr": 1e-2}})
    plain = train_plainly(2, STEPS, build=in_float64, make_optimizer=IN_FLOAT64[kind])
    run = train_on_threads(2, config, STEPS, build=in_float64)
    assert_close(run.params, plain.params, 1e-15)
