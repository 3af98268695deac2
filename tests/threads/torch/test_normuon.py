"""Muon with scaled rows (NorMuon): the paper's formula in float64, stages, ranks, checkpoints, refusals."""

from __future__ import annotations

import pytest
import torch
from paper_muon import by_singular_values
from torch import nn

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.utils import safe_get_full_optimizer_state

STEPS = 4
SHAPES = ((9, 6), (9, 9), (5, 9), (80, 5), (3, 80))
PARAMS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "normuon_beta": 0.8}


def model_of_seed(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(*(nn.Linear(columns, rows, bias=False, dtype=dtype) for rows, columns in SHAPES))
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=generator, dtype=torch.float64) / one.shape[1] ** 0.5)
    return model


def inputs(step, rank, dtype=torch.float32):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64).to(dtype)


def in_float64(world):
    model = model_of_seed(torch.float64)
    momenta = [torch.zeros_like(one) for one in model.parameters()]
    averages = [torch.zeros(len(one), 1, dtype=torch.float64) for one in model.parameters()]
    for at in range(STEPS):
        model.zero_grad()
        for rank in range(world):
            (model(inputs(at, rank, torch.float64)).square().mean() / world).backward()
        with torch.no_grad():
            for one, momentum, average in zip(model.parameters(), momenta, averages, strict=True):
                momentum.mul_(0.9).add_(one.grad, alpha=0.1)
                update = by_singular_values(0.1 * one.grad + 0.9 * momentum)
                average.mul_(0.8).add_(update.square().mean(1, keepdim=True), alpha=0.2)
                scaled = update / average.sqrt()
                scaled *= update.norm() / scaled.norm()
                scale = max(1.0, one.shape[0] / one.shape[1]) ** 0.5
                one.copy_(one * (1 - 0.05 * 0.1) - 0.05 * scale * scaled)
    return model.state_dict()


def engine_at(stage, **sections):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Muon", "params": PARAMS},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200, "stage3_param_persistence_threshold": 10},
    }
    return polyaccel.initialize(model=model_of_seed(), config=config | sections)[0]


def train(world, stage, folder=None, saves=False):
    def go(communicator):
        engine = engine_at(stage)
        if folder is not None and not saves:
            engine.load_checkpoint(str(folder))
            average = safe_get_full_optimizer_state(engine.module[0].weight, "row_average")
            assert average.shape == (9, 6)
            assert torch.equal(average, average[:, :1].expand(9, 6))
        for at in range(0 if folder is None or saves else 2, 2 if saves else STEPS):
            engine.backward(engine(inputs(at, communicator.rank)).square().mean())
            engine.step()
        if saves:
            engine.save_checkpoint(str(folder))
        found = {name: value.detach().clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return found

    return run_threads(world, go)


def check(found, wanted):
    for each in found:
        for name, value in wanted.items():
            torch.testing.assert_close(each[name].double(), value, rtol=0.0, atol=2e-4)


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 1), (3, 2), (2, 3)])
def test_training_follows_the_formula(world, stage):
    check(train(world, stage), in_float64(world))


def test_averages_of_rows_go_along(tmp_path):
    train(2, 2, tmp_path, saves=True)
    check(train(2, 3, tmp_path), in_float64(2))


def test_a_wrong_decay_is_named():
    with pytest.raises(ConfigError) as caught:
        engine_at(1, optimizer={"type": "Muon", "params": PARAMS | {"normuon_beta": 1.5}})
    assert {problem.key for problem in caught.value.problems} == {"optimizer.params.normuon_beta"}
