"""Ranks that hold no element of a parameter, or of a whole bucket, do all that the others do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import polyaccel
from polyaccel.errors import ShardingError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)


def one_output():
    return nn.Linear(4, 1)


def scalar_beside_vector():
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(1))
    model.weight = nn.Parameter(torch.ones(5))
    model.forward = lambda value: (value @ model.weight[:4, None]) * model.scale
    return model


def two_small_layers():
    return nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 1))


def adamw(model):
    """A group for each parameter, hence a bucket for each."""
    return torch.optim.AdamW([{"params": [each]} for each in model.parameters()], lr=0.01)


def adagrad(model):
    return torch.optim.Adagrad([{"params": [each]} for each in model.parameters()], lr=0.01)


MODELS = [(one_output, adamw), (scalar_beside_vector, adamw), (two_small_layers, adagrad), (one_output, None)]


def make_engine(make, client, stage):
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    model = make()
    if client is None:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    return polyaccel.initialize(model=model, config=config, optimizer=None if client is None else client(model))[0]


def trained(engine):
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()


@pytest.mark.parametrize(("make", "client"), MODELS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_every_function_returns_on_every_rank(make, client, stage, world):
    def rank(communicator):
        engine = make_engine(make, client, stage)
        trained(engine)
        kind = "sum" if client is adagrad else "exp_avg"
        shapes = []
        for parameter in list(engine.module.parameters()):
            whole = safe_get_full_optimizer_state(parameter, kind)
            shapes.append((whole.shape == parameter.shape, bool(whole.abs().sum() > 0)))
            with pytest.raises(ShardingError):
                safe_get_full_optimizer_state(parameter, "nothing")
            safe_set_full_optimizer_state(parameter, torch.full_like(whole, 0.5), kind)
            assert torch.equal(safe_get_full_optimizer_state(parameter, kind), torch.full_like(whole, 0.5))
            own = safe_get_local_optimizer_state(parameter, kind)
            safe_set_local_optimizer_state(parameter, own * 2.0, kind)
            assert torch.equal(safe_get_full_optimizer_state(parameter, kind), torch.full_like(whole, 1.0))
            safe_set_full_fp32_param(parameter, torch.full_like(whole, 3.0))
            safe_set_local_fp32_param(parameter, safe_get_local_fp32_param(parameter) + 1.0)
            assert torch.equal(safe_get_full_fp32_param(parameter), torch.full_like(whole, 4.0))
        engine.backward(engine(torch.ones(2, 4)).sum())
        for parameter in list(engine.module.parameters()):
            safe_set_full_grad(parameter, torch.full_like(safe_get_full_grad(parameter), 2.0))
            safe_set_local_grad(parameter, safe_get_local_grad(parameter) * 2.0)
            assert torch.equal(safe_get_full_grad(parameter), torch.full_like(safe_get_full_grad(parameter), 4.0))
        engine.step()
        with polyaccel.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
            for parameter in engine.module.parameters():
                parameter.data.fill_(2.0)
        return shapes, {name: value.tolist() for name, value in engine.module_state_dict().items()}

    found = run_threads(world, rank)
    assert all(each == found[0] for each in found)
    assert all(pair == (True, True) for pair in found[0][0])
    assert all(set(torch.tensor(value).flatten().tolist()) == {2.0} for value in found[0][1].values())


@pytest.mark.parametrize(("make", "client"), MODELS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_are_saved_and_loaded(make, client, stage, tmp_path):
    def run(world, first):
        def rank(communicator):
            engine = make_engine(make, client, stage)
            if first:
                trained(engine)
                engine.save_checkpoint(str(tmp_path / "run"))
                engine.save_16bit_model(str(tmp_path), "whole.safetensors")
            else:
                engine.load_checkpoint(str(tmp_path / "run"))
            trained(engine)
            return {name: value.tolist() for name, value in engine.module_state_dict().items()}

        return run_threads(world, rank)

    (expected, *_) = run(2, first=True)
    for world in (1, 3):
        for found in run(world, first=False):
            assert found.keys() == expected.keys()
            for name, value in found.items():
                torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[name]))
