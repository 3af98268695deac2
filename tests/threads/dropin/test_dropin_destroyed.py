"""Engines of the drop-in that clients destroy, and others over the same model after them."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from polyaccel.comm.base import Communicator
from polyaccel.errors import ShardingError
from polyaccel.testkit.ranks.threads import run_threads


def _prepared(model: nn.Module, stage: int, *, trains: bool) -> Any:
    """An engine as Accelerate makes it: without an optimizer for an evaluation."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
    config["zero_optimization"] = {"stage": stage}
    if trains:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}}
    return deepspeed.initialize(model=model, config=config)[0]


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_trains_on_after_its_engine_was_destroyed(stage: int, evaluates: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    wanted = []
    for trained in (not evaluates, True):
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
        for _ in range(2):
            loss = plain(x).square().mean()
            wanted.append(loss.item())
            if trained:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    def body(communicator: Communicator) -> list[float]:
        own, found = copy.deepcopy(model), []
        for trains in (not evaluates, True):
            engine = _prepared(own, stage, trains=trains)
            for _ in range(2):
                loss = engine(x).square().mean()
                found.append(loss.item())
                if trains:
                    engine.backward(loss)
                    engine.step()
            engine.destroy()
            with pytest.raises(ShardingError) as refused:  # what a Trainer that holds on to it calls first
                engine.zero_grad()
            assert "trainer.model_wrapped" in str(refused.value)
        return found

    for found in run_threads(2, body):
        assert found == pytest.approx(wanted, rel=1e-5)
