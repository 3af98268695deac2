"""Values pass the functions that docs/walks.toml lists, in that order."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from called_functions import called_functions, differences
from torch import nn

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.experts import Mixture

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "docs" / "generate"))

from architecture import read_walks  # noqa: E402

WALKS = {walk["name"]: [tuple(step) for step in walk["steps"]] for walk in read_walks()}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def config(stage: int) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        "checkpoint": {"async": False},
    }


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()


@pytest.mark.parametrize(("name", "stage"), [("zero2_gradient", 2), ("zero3_parameter", 3)])
def test_a_value_of_a_step(name: str, stage: int) -> None:
    models = [model() for _ in range(2)]

    def train(communicator: Communicator) -> list[tuple[str, int]]:
        engine, *_ = polyaccel.initialize(model=models[communicator.rank], config=config(stage))
        step(engine)  # the second step has a schedule of the first
        with called_functions() as calls:
            step(engine)
        engine.destroy()
        return calls

    assert differences(WALKS[name], run_threads(2, train)[0]) == []


def test_a_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config(2)))
    models = [model() for _ in range(2)]

    def start(communicator: Communicator) -> list[tuple[str, int]]:
        with called_functions() as calls:
            engine, *_ = polyaccel.initialize(model=models[communicator.rank], config=file)
        engine.destroy()
        return calls

    assert differences(WALKS["config"], run_threads(2, start)[0]) == []


def test_a_checkpoint(tmp_path: Path) -> None:
    models = [model() for _ in range(2)]

    def save_and_load(communicator: Communicator) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        engine, *_ = polyaccel.initialize(model=models[communicator.rank], config=config(2))
        step(engine)
        with called_functions() as saving:
            engine.save_checkpoint(str(tmp_path), tag="first")
        with called_functions() as loading:
            engine.load_checkpoint(str(tmp_path), tag="first")
        engine.destroy()
        return saving, loading

    saving, loading = run_threads(2, save_and_load)[0]
    assert differences(WALKS["save"], saving) == []
    assert differences(WALKS["load"], loading) == []


def test_a_token() -> None:
    models = [nn.Sequential(Mixture(8, expert, 4, k=2)) for _ in range(2)]
    settings = {**config(1), "expert_parallel": {"enabled": True, "autoep_size": 2}}

    def forward(communicator: Communicator) -> list[tuple[str, int]]:
        engine, *_ = polyaccel.initialize(model=models[communicator.rank], config=settings)
        with called_functions() as calls:
            engine(torch.ones(2, 3, 8))
        engine.destroy()
        return calls

    assert differences(WALKS["token"], run_threads(2, forward)[0]) == []
