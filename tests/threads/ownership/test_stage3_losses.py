"""Losses that use parameters outside of forward, backward hooks, and compiled parts, at stage 3 as at stage 0."""

from __future__ import annotations

import pytest
import torch
from parity_models import assert_close, make_config, on_threads, snapshot
from stage3_models import WIDTH, seeded
from torch import Tensor, nn

import polyaccel
from polyaccel.errors import ShardingError
from polyaccel.zero import GatheredParameters

ZERO = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 64}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit."),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden).square().mean()


def weights(engine) -> list[nn.Parameter]:
    return list(engine.module.parameters())


def weight_penalty(engine, inputs: Tensor) -> Tensor:
    loss = engine(inputs)
    with GatheredParameters(weights(engine)):
        return loss + 0.1 * sum(weight.square().sum() for weight in weights(engine))


def weight_penalty_first(engine, inputs: Tensor) -> Tensor:
    with GatheredParameters(weights(engine)):
        penalty = sum(weight.norm() for weight in weights(engine))
    return engine(inputs) + 0.1 * penalty


def penalty_of_one_weight(engine, inputs: Tensor) -> Tensor:
    weight = engine.module.blocks[1][0].weight
    with GatheredParameters(weight):
        penalty = (weight @ weight.T - torch.eye(WIDTH)).square().sum()
    return engine(inputs) + 0.1 * penalty


def gradient_penalty_of_inputs(engine, inputs: Tensor) -> Tensor:
    inputs.requires_grad_()
    loss = engine(inputs)
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + slope.square().sum()


def gradient_penalty_of_weights(engine, inputs: Tensor) -> Tensor:
    loss = engine(inputs)
    with GatheredParameters(weights(engine)):
        slopes = torch.autograd.grad(loss, weights(engine), create_graph=True)
    return loss + sum(slope.square().sum() for slope in slopes)


def weighted_by_its_gradient(engine, inputs: Tensor) -> Tensor:
    loss = engine(inputs)
    with GatheredParameters(weights(engine)):
        slopes = torch.autograd.grad(loss, weights(engine), retain_graph=True)
    return loss * (1 + float(sum(slope.square().sum() for slope in slopes)))


LOSSES = {
    "weight penalty": weight_penalty,
    "weight penalty before forward": weight_penalty_first,
    "penalty of one weight": penalty_of_one_weight,
    "gradient penalty of inputs": gradient_penalty_of_inputs,
    "gradient penalty of weights": gradient_penalty_of_weights,
    "loss weighted by its gradient": weighted_by_its_gradient,
}


def plain_net(model: Net) -> None:
    """As it is."""


def hooks_that_give_none(model: Net) -> None:
    for module in (model, *model.blocks):
        module.register_full_backward_pre_hook(lambda module, gradients: None)
        module.register_full_backward_hook(lambda module, inputs, outputs: None)


def hooks_that_change_gradients(model: Net) -> None:
    for block in model.blocks:
        block.register_full_backward_hook(lambda module, inputs, outputs: tuple(one * 0.5 for one in inputs))


def a_traced_part(model: Net) -> None:
    model.blocks[1] = torch.jit.trace(model.blocks[1], torch.randn(4, WIDTH))


CHANGES = [hooks_that_give_none, hooks_that_change_gradients, a_traced_part]
CASES = [(plain_net, loss) for loss in LOSSES] + [(change, "") for change in CHANGES]


def changed(change):
    def build() -> Net:
        model = seeded(Net)()
        change(model)
        return model

    return build


def data(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(change, loss_of, stage: int):
    def work(communicator, model):
        engine = polyaccel.initialize(model=model, config=make_config(stage, zero=ZERO))[0]
        for step in range(3):
            engine.backward(loss_of(engine, data(step, communicator.rank)))
            engine.step()
        assert engine.zero.params.gathered.live_numel == 0
        engine.destroy()
        return snapshot(model)

    return on_threads(2, work, changed(change))[0]


@pytest.mark.parametrize(("change", "loss"), CASES, ids=[loss or change.__name__ for change, loss in CASES])
def test_training_is_that_of_stage_0(change, loss):
    loss_of = LOSSES.get(loss, lambda engine, inputs: engine(inputs))
    assert_close(trained(change, loss_of, 3), trained(change, loss_of, 0))


@pytest.mark.parametrize("use", [lambda weight: weight.square(), lambda weight: torch.autograd.grad(weight, weight)])
def test_a_use_outside_of_forward_names_the_parameter_and_the_cure(use):
    def work(communicator, model):
        polyaccel.initialize(model=model, config=make_config(3, zero=ZERO))
        with pytest.raises(ShardingError) as caught:
            use(model.blocks[1][0].weight)
        assert caught.value.value == "blocks.1.0.weight"
        assert "GatheredParameters" in str(caught.value)

    on_threads(2, work, seeded(Net))


def test_a_torchscript_part_is_refused_by_name():
    def script(model: Net) -> None:
        model.blocks[1] = torch.jit.script(model.blocks[1])

    def work(communicator, model):
        with pytest.raises(ShardingError) as caught:
            polyaccel.initialize(model=model, config=make_config(3, zero=ZERO))
        assert caught.value.value == "blocks.1"
        assert all(part in str(caught.value) for part in ("TorchScript", "torch.compile"))
        replicated = polyaccel.initialize(model=changed(script)(), config=make_config(2))[0]
        replicated.backward(replicated(data(0, 0)))
        replicated.step()

    on_threads(1, work, changed(script))


def test_training_needs_no_torchscript(monkeypatch):
    """torch deprecates it, and a later one may be without."""
    wanted = trained(plain_net, weight_penalty, 0)
    monkeypatch.delattr(torch.jit, "RecursiveScriptModule")
    assert_close(trained(plain_net, weight_penalty, 3), wanted)
