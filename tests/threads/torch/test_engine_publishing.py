"""`overlap_param_gather`: whoever reads parameters reads updated ones, by whichever road.

The ranks' communicator fills with NaN what a gather under way will overwrite, so a wait that is missing is seen.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from parity_models import assert_bitwise, drawn_from, engine_for, make_config, on_threads, snapshot
from torch import nn

STEPS = 4
stages = pytest.mark.parametrize("stage", [1, 2])


class Functional(nn.Module):
    """Uses parameters without calling the modules that hold them, always or in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)  # its forward reads out_proj.weight and does not call out_proj
        self.holder = nn.Linear(8, 8)
        self.switched = nn.Linear(8, 8)
        self.own = nn.Parameter(torch.ones(8))
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, values, calls=True):
        hidden, _ = self.attention(values, values, values)
        hidden = nn.functional.linear(hidden, self.holder.weight, self.holder.bias) * self.own
        hidden = self.switched(hidden) if calls else nn.functional.linear(hidden, self.switched.weight)
        return self.norm(hidden).square().mean()


def functional() -> Functional:
    with drawn_from(6):
        return Functional()


def values(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def config_for(stage, deferred):
    return make_config(stage, zero={"reduce_bucket_size": 16, "overlap_param_gather": deferred})


@stages
@pytest.mark.parametrize(
    "calls",
    [lambda step: True, lambda step: step % 2 == 0, lambda step: step < 2],
    ids=["always", "now and then", "later not"],
)
def test_parameters_used_outside_their_module_are_up_to_date(stage, calls):
    def train(communicator, model, deferred):
        engine = engine_for(model, config_for(stage, deferred))
        for step in range(STEPS):
            engine.backward(engine(values(step, communicator.rank), calls=calls(step)))
            engine.step()
        return snapshot(engine.module)

    waited, deferred = (on_threads(2, train, functional, deferred) for deferred in (False, True))
    for params in deferred:
        assert_bitwise(params, waited[0])


ROADS = {
    "state_dict of the module": lambda engine, model: model.state_dict(),
    "state_dict of the engine": lambda engine, model: engine.state_dict(),
    "engine.module": lambda engine, model: snapshot(engine.module),
    "evaluation by the engine": lambda engine, model: {"loss": engine.eval()(values(9, 0))},
    "evaluation of the module": lambda engine, model: {"loss": model.eval()(values(9, 0), calls=False)},
    "without gradients": lambda engine, model: {"loss": torch.no_grad()(engine)(values(9, 0), calls=False)},
    "destroy": lambda engine, model: engine.destroy() or snapshot(model),
}


@stages
@pytest.mark.parametrize("read", ROADS.values(), ids=ROADS)
def test_every_road_to_the_parameters_waits(stage, read):
    def train(communicator, model, deferred):
        engine = engine_for(model, config_for(stage, deferred))
        for step in range(2):
            engine.backward(engine(values(step, communicator.rank)))
            engine.step()
        return {name: value.detach().clone() for name, value in read(engine, model).items()}

    waited, deferred = (on_threads(2, train, functional, deferred) for deferred in (False, True))
    assert all(value.isfinite().all() for value in waited[0].values())
    for found in deferred:
        assert_bitwise(found, waited[0])


@stages
def test_gathers_last_into_the_next_forward(stage):
    """Else the setting would be a silent no-op: after a step parameters are under way, and arrive one by one."""

    def train(communicator, model):
        engine = engine_for(model, config_for(stage, True))
        left = []
        for module in (model, model.attention, model.switched):
            module.register_forward_hook(lambda *_: left.append(len(engine.zero.params.arriving)))
        for step in range(2):
            engine.backward(engine(values(step, communicator.rank)))
            engine.step()
        left.clear()
        engine(values(2, communicator.rank))
        return left

    for after_attention, after_switched, after_all in on_threads(2, train, functional):
        assert after_attention > after_switched > after_all == 0


def test_a_parameter_that_is_under_way_looks_like_itself():
    class Own(nn.Parameter):
        pass

    def look(communicator, model):
        model.own = Own(torch.ones(8))
        engine = engine_for(model, config_for(2, True))
        engine.backward(engine(values(0, communicator.rank)))
        engine.step()
        arriving = len(engine.zero.params.arriving)
        own = model.own
        assert isinstance(own, nn.Parameter)
        assert (own.shape, own.dtype, own.requires_grad, own.grad) == ((8,), torch.float32, True, None)
        assert len(engine.zero.params.arriving) == arriving > 3  # none of this waits
        copies = [copy.deepcopy(model.holder.weight), pickle.loads(pickle.dumps(model.switched.weight))]
        assert len(engine.zero.params.arriving) == arriving - 2
        assert "nan" not in repr(model.attention.in_proj_weight)
        for copied, original in zip(copies, (model.holder.weight, model.switched.weight), strict=True):
            assert type(copied) is nn.Parameter
            assert isinstance(original, nn.Parameter)
            assert torch.equal(copied, original)
        assert (own + 1).isfinite().all()
        assert isinstance(own, Own)
        assert own.__dict__ == {}

    on_threads(2, look, functional)
