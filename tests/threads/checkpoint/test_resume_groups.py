"""Optimizer groups and their states follow the parameters' names at a load, or the load is refused by name."""

from __future__ import annotations

import pytest
import torch
from parity_models import on_threads
from torch import nn

import polyaccel
from polyaccel.errors import CheckpointError


class Pair(nn.Module):
    """Two layers of equal shapes, so that swapped states would fit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class OwnSGD(torch.optim.SGD):
    """Unknown to the engine, so it runs on whole parameters at stage 0."""


def build() -> nn.Module:
    torch.manual_seed(3)
    return Pair()


def config(stage: int, **more) -> dict:
    return {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, **more}


def train(engine, steps) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + polyaccel.comm.get_rank())
        x, y = torch.randn(4, 5, generator=generator), torch.randn(4, 5, generator=generator)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def continued(tmp_path, world_size, start, resume, **arguments) -> tuple[list[float], list[float]]:
    """The losses after a save, and those of an engine that `resume` makes and that loads it."""

    def first(communicator, model):
        engine = start(model)
        train(engine, range(3))
        engine.save_checkpoint(str(tmp_path))
        engine.wait_for_checkpoint()
        return train(engine, range(3, 6))

    def second(communicator, model):
        engine = resume(model)
        engine.load_checkpoint(str(tmp_path), **arguments)
        return train(engine, range(3, 6))

    return on_threads(world_size, first, build)[0], on_threads(world_size, second, build)[0]


def grouped(stage: int, order=(0, 1), optimizer=None, **more):
    def make(model):
        groups = [
            {"params": [model.first.weight, model.second.weight], "weight_decay": 0.5},
            {"params": [model.first.bias, model.second.bias], "weight_decay": 0.0, "lr": 0.1},
        ]
        chosen = [groups[index] for index in order]
        if optimizer is not None:
            return polyaccel.initialize(model=model, optimizer=optimizer(chosen), config=config(stage, **more))[0]
        settings = config(stage, optimizer={"type": "AdamW", "params": {"lr": 0.01}}, **more)
        return polyaccel.initialize(model=model, model_parameters=chosen, config=settings)[0]

    return make


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_groups_in_another_order_take_over_by_name(tmp_path, stage):
    want, found = continued(tmp_path, 2, grouped(stage), grouped(stage, order=(1, 0)))
    assert found == want


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, OwnSGD])
def test_groups_of_a_client_optimizer_take_over_by_name(tmp_path, optimizer):
    def make(groups):
        return optimizer(groups, lr=0.01, **({"momentum": 0.9} if optimizer is OwnSGD else {}))

    want, found = continued(tmp_path, 1, grouped(0, optimizer=make), grouped(0, order=(1, 0), optimizer=make))
    assert found == want


def test_states_of_whole_parameters_follow_their_names_within_a_group(tmp_path):
    def make(order):
        def engine(model):
            members = [model.first.weight, model.second.weight, model.first.bias, model.second.bias]
            optimizer = OwnSGD([members[index] for index in order], lr=0.05, momentum=0.9)
            return polyaccel.initialize(model=model, optimizer=optimizer, config=config(0))[0]

        return engine

    want, found = continued(tmp_path, 1, make((0, 1, 2, 3)), make((1, 0, 3, 2)))
    assert found == want


def test_a_parameter_that_moved_to_another_group_is_named(tmp_path):
    def moved(model):
        groups = [
            {"params": [model.first.weight], "weight_decay": 0.5},
            {"params": [model.second.weight, model.first.bias, model.second.bias], "weight_decay": 0.0, "lr": 0.1},
        ]
        settings = config(1, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
        return polyaccel.initialize(model=model, model_parameters=groups, config=settings)[0]

    with pytest.raises(CheckpointError) as caught:
        continued(tmp_path, 1, grouped(1), moved)
    assert "second.weight" in str(caught.value)


def test_a_schedule_with_values_by_position_refuses_another_order(tmp_path):
    def with_schedule(order):
        def make(model):
            groups = [
                {"params": [model.first.weight, model.second.weight]},
                {"params": [model.first.bias, model.second.bias], "lr": 0.1},
            ]
            optimizer = torch.optim.AdamW([groups[index] for index in order], lr=0.01)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return polyaccel.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config(1))[0]

        return make

    with pytest.raises(CheckpointError):
        continued(tmp_path, 1, with_schedule((0, 1)), with_schedule((1, 0)))
