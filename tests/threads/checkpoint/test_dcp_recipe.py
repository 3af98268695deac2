"""Our export loads in plain torch by its own recipe, and plain torch goes on with our next losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peer_runs import AFTER, BEFORE, PlainRun, batch, built
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import polyaccel
from polyaccel.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.5), {"type": "AdamW", "params": {"lr": 0.01}}),
    "momentum": (
        lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
        {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
    ),
    "RAdam": (lambda p: torch.optim.RAdam(p, lr=0.01), {}),
}


def steps(engine: Any, numbers: range) -> list[float]:
    losses = []
    for step in numbers:
        x, y = batch(step)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", KINDS)
def test_torch_goes_on_by_its_own_recipe(name: str, tmp_path: Path) -> None:
    make, section = KINDS[name]
    model = built(1)
    config: dict[str, Any] = {"train_batch_size": 6, "zero_optimization": {"stage": 2}}
    given: dict[str, Any] = {} if section else {"optimizer": make(model.parameters())}
    if section:
        config["optimizer"] = section
    engine = polyaccel.initialize(model=model, config=config, **given)[0]
    steps(engine, range(BEFORE))
    engine.save_checkpoint(str(tmp_path / "ours"))
    wanted = steps(engine, range(BEFORE, BEFORE + AFTER))
    engine.destroy()
    assert main(["ckpt", "export", str(tmp_path / "ours"), str(tmp_path / "out"), "--format", "dcp"]) == 0
    run = PlainRun(make)
    model_state, optimizer_state = get_state_dict(run.model, run.optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(run.model, run.optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert run.losses(range(BEFORE, BEFORE + AFTER)) == pytest.approx(wanted, rel=2e-6)
