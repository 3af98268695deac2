"""What a script does to gradients, and layers that are unfrozen, where the ranks of a host share parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity_models import (
    Params,
    assert_bitwise,
    assert_close,
    grouped,
    make_config,
    parity_loss,
    parity_model,
    snapshot,
    train,
    train_plainly,
)

import polyaccel
from polyaccel.comm.backends.shm.backend import ShmBackend
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.procs import RankPool

pytestmark = pytest.mark.skipif(not ShmBackend.probe().usable, reason="needs Linux and the compiled library")
Pools = Callable[..., RankPool]
STEPS = 3


def config_at(stage: int) -> dict[str, Any]:
    return make_config(stage, zero={"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 20})


def clip(model: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_here(communicator: Communicator, config: dict[str, Any]) -> Params:
    return train(communicator, parity_model(), config, STEPS, before_update=clip).params


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_are_clipped_by_hand(rank_pool: Pools, stage: int) -> None:
    wanted = train_plainly(2, STEPS, before_update=clip).params
    for params in rank_pool(2, "shm").run(clip_here, config_at(stage)):
        assert_close(params, wanted)


def unfreeze_here(communicator: Communicator, config: dict[str, Any]) -> Params:
    model = parity_model()
    groups = grouped(model)
    model.wide.requires_grad_(False)
    engine, *_ = polyaccel.initialize(model=model, model_parameters=groups, config=config)
    for step in range(STEPS):
        if step == 1:
            model.wide.requires_grad_(True)
        engine.backward(parity_loss(engine, step, 0, communicator.rank))
        engine.step()
    engine.destroy()
    return snapshot(model)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_layers_are_unfrozen(rank_pool: Pools, stage: int) -> None:
    model = parity_model()
    optimizer = torch.optim.AdamW(grouped(model), lr=1e-2)
    model.wide.requires_grad_(False)
    for step in range(STEPS):
        if step == 1:
            model.wide.requires_grad_(True)
        (sum(parity_loss(model, step, 0, rank) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    runs = rank_pool(2, "shm").run(unfreeze_here, config_at(stage))
    assert_bitwise(runs[1], runs[0])
    assert_close(runs[0], snapshot(model))
