"""`torch.func`'s transforms in a model's forward, under stage 3 as in plain torch."""

from __future__ import annotations

import pytest
import torch
from parity_models import assert_close, make_config, on_threads, snapshot
from stage3_models import WIDTH, seeded
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import polyaccel
from polyaccel.errors import ShardingError

ZERO = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 64}


class Net(nn.Module):
    """An energy, whose loss `how` makes of it."""

    def __init__(self, how) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def energy(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden).sum()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.how(self, inputs)


def by_vjp(net: Net, inputs: Tensor) -> Tensor:
    energy, pull = vjp(net.energy, inputs)
    return pull(torch.ones_like(energy))[0].square().sum() + energy


def by_jvp(net: Net, inputs: Tensor) -> Tensor:
    energy, slope = jvp(net.energy, (inputs,), (torch.ones_like(inputs),))
    return energy + slope.square()


def by_jvp_of_a_block(net: Net, inputs: Tensor) -> Tensor:
    value, slope = jvp(net.blocks[0], (inputs,), (torch.ones_like(inputs),))
    return (value * slope).sum() + net.energy(inputs)


def by_gradient_of_parameters(net: Net, inputs: Tensor) -> Tensor:
    """A learned learner: one step of gradient descent inside the loss."""
    block = net.blocks[0]
    weights = dict(block.named_parameters())
    slopes = grad(lambda inner: functional_call(block, inner, (inputs,)).square().sum())(weights)
    stepped = {name: weights[name] - 0.1 * slope for name, slope in slopes.items()}
    return functional_call(block, stepped, (inputs,)).square().sum() + net.energy(inputs)


REVERSE = {
    "grad": lambda net, inputs: grad(net.energy)(inputs).square().sum() + net.energy(inputs),
    "vjp": by_vjp,
    "jacrev": lambda net, inputs: jacrev(net.energy)(inputs).square().sum(),
    "vmap": lambda net, inputs: vmap(net.energy)(inputs).square().sum(),
    "vmap of grad": lambda net, inputs: vmap(grad(net.energy))(inputs).square().sum(),
    "grad of grad": lambda net, inputs: grad(lambda x: grad(net.energy)(x).square().sum())(inputs).square().sum(),
    "a gradient of parameters": by_gradient_of_parameters,
}
FORWARD = {
    "jvp": by_jvp,
    "jvp of a block": by_jvp_of_a_block,
    "jacfwd": lambda net, inputs: jacfwd(net.energy)(inputs).square().sum(),
    "hessian": lambda net, inputs: hessian(net.energy)(inputs[0]).square().sum(),
}
"""torch's levels of forward differentiation are one a process, so that two threads cannot use them at a time."""
CASES = {name: (2, how) for name, how in REVERSE.items()} | {name: (1, how) for name, how in FORWARD.items()}


def data(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(world: int, how, stage: int, **keys):
    """Parameters after three steps, the second one of two micro-batches whose forwards come first."""

    def work(communicator, model):
        config = make_config(stage, zero={**ZERO, **keys})
        engine = polyaccel.initialize(model=model, config=config)[0]
        for step in range(3):
            losses = [engine(data(step + 5 * micro, communicator.rank)) for micro in range(1 + (step == 1))]
            for loss in losses:
                engine.backward(loss)
            engine.step()
        assert engine.zero.params.gathered.live_numel == 0
        engine.destroy()
        return snapshot(model)

    return on_threads(world, work, seeded(lambda: Net(how)))[0]


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch's own, in its rules for jvp
@pytest.mark.parametrize("name", CASES)
def test_a_transform_in_forward_trains_as_at_stage_0(name):
    world, how = CASES[name]
    assert_close(trained(world, how, 3), trained(world, how, 0))


def test_a_transform_around_the_engine_gives_the_gradient_of_its_input():
    plain = seeded(lambda: Net(Net.energy))()

    def work(communicator, model):
        engine = polyaccel.initialize(model=model, config=make_config(3, zero=ZERO))[0]
        inputs = data(0, 0)
        assert torch.allclose(grad(engine)(inputs), grad(plain)(inputs))
        engine.backward(engine(inputs))
        engine.step()
        assert engine.zero.params.gathered.live_numel == 0

    on_threads(2, work, seeded(lambda: Net(Net.energy)))


def test_a_transform_beside_a_modules_own_parameters_says_what_works():
    class Owner(Net):
        def __init__(self) -> None:
            super().__init__(lambda net, inputs: grad(net.energy)(inputs * net.scale).sum())
            self.scale = nn.Parameter(torch.ones(WIDTH))

    def work(communicator, model):
        engine = polyaccel.initialize(model=model, config=make_config(3, zero=ZERO))[0]
        with pytest.raises(ShardingError) as caught:
            engine(data(0, 0))
        assert all(part in str(caught.value) for part in ("torch.func.grad", "torch.autograd.grad"))
        assert engine.zero.params.gathered.live_numel == 0

    on_threads(2, work, seeded(Owner))


class OverWeight(nn.Module):
    """A model whose forward transforms a function of a weight that a unit below owns."""

    def __init__(self, how) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs).sum() + self.how(self.layer.weight, inputs.detach().sum(0))


OVER_WEIGHTS = {
    "grad": lambda weight, row: grad(lambda one: (row @ one.T).square().sum())(weight).sum(),
    "grad of a power": lambda weight, row: grad(lambda one: one.pow(2).sum())(weight).sum(),
    "vjp": lambda weight, row: vjp(lambda one: row @ one.T, weight)[1](row)[0].sum(),
    "jvp": lambda weight, row: jvp(lambda one: row @ one.T, (weight,), (torch.ones_like(weight),))[1].sum(),
    "jacrev": lambda weight, row: jacrev(lambda one: (one @ row).square())(weight).sum(),
    "vmap": lambda weight, row: vmap(lambda one: one.pow(2).sum() + one @ row)(weight).sum(),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch's own, in its rules for jvp
@pytest.mark.parametrize("name", OVER_WEIGHTS)
def test_a_transform_over_a_sharded_weight_has_its_values_or_is_refused(name):
    transform = OVER_WEIGHTS[name]
    expected = seeded(lambda: OverWeight(transform))()(data(0, 0))
    world = 1 if name in FORWARD else 2

    def work(communicator, model):
        engine = polyaccel.initialize(model=model, config=make_config(3, zero=ZERO))[0]
        with pytest.raises(ShardingError):  # no pass runs
            transform(model.layer.weight, torch.ones(WIDTH))
        loss, refused = None, ""
        try:
            loss = engine(data(0, 0))
        except ShardingError as error:
            refused = str(error)
        assert "torch.func" in refused if loss is None else torch.allclose(loss, expected)

    on_threads(world, work, seeded(lambda: OverWeight(transform)))
