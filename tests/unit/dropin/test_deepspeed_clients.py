"""Checkpoints of a real DeepSpeed with a client's optimizer and LambdaLR: training goes on with DeepSpeed's own next
losses. `tests/golden/deepspeed/make_clients.py` made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_runs import GOLDEN
from polyaccel_deepspeed.exchange.importing import read
from torch import nn

import polyaccel
from polyaccel.checkpoint import open_checkpoint
from polyaccel.checkpoint.convert.importing import Incoming, imported
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError
from polyaccel.testkit.ranks.threads import run_threads

CLIENTS = GOLDEN / "clients"
TOLD: dict[str, Any] = json.loads((GOLDEN / "clients.json").read_text())
TOLD["universal3"] = TOLD["adamw3"]
SAMPLES = 6
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}
CONFIGS: dict[str, Any] = {
    "AdamW": {"type": "AdamW", "params": {"lr": 0.5}},
    "Adamax": {"type": "Adamax", "params": {"lr": 0.5}},
    "SGD": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1]},
        {"params": [param for param in trained if param.ndim <= 1], "lr": 0.003},
    ]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(50 + step)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 3, generator=generator)


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def next_losses(name: str, folder: Path, stage: int, *, of_config: bool = False, **load: Any) -> list[float]:
    """Losses of an engine under the same optimizer, or the config's, and the same LambdaLR."""

    def job(communicator: Communicator) -> list[float]:
        torch.manual_seed(9)
        model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        width = SAMPLES // communicator.world_size
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": width,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 1.0,  # DeepSpeed's default
        }
        if of_config:
            config["optimizer"] = CONFIGS[TOLD[name]["optimizer"]]
            given: dict[str, Any] = {"model_parameters": groups_of(model), "lr_scheduler": decaying}
        else:
            optimizer = OPTIMIZERS[TOLD[name]["optimizer"]](groups_of(model))
            given = {"optimizer": optimizer, "lr_scheduler": decaying(optimizer)}
        engine = polyaccel.initialize(model=model, config=config, **given)[0]
        try:
            _, client_state = engine.load_checkpoint(str(folder), **load)
            assert client_state == {"epoch": 3}
            assert engine.lr_scheduler.last_epoch == engine.global_steps == 4
            rows = slice(width * communicator.rank, width * (communicator.rank + 1))
            losses = []
            for step in range(4, 8):
                x, y = batch(step)
                loss = nn.functional.mse_loss(engine(x[rows]), y[rows])
                engine.backward(loss)
                engine.step()
                losses.append(sum(communicator.all_gather_object(loss.item())) / communicator.world_size)
            return losses
        finally:
            engine.destroy()

    return run_threads(TOLD[name]["ranks"], job)[0]


def load(incoming: Incoming, folder: Path) -> None:
    assert [each for each in incoming.left_out if each.is_needed] == []
    imported(incoming, str(folder), "imported", "DeepSpeed", lambda nbytes: None)


@pytest.fixture(params=[*TOLD])
def taken(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Each of DeepSpeed's checkpoints, and ours of it."""
    load(read(CLIENTS / request.param), tmp_path / "c")
    return request.param, tmp_path / "c"


def test_a_client_optimizer_goes_on_with_the_losses_of_deepspeed(taken: tuple[str, Path]) -> None:
    name, folder = taken
    stage = (TOLD[name]["stage"] + 1) % 4
    assert next_losses(name, folder, stage) == pytest.approx(TOLD[name]["losses"][4:], rel=2e-6)
    if TOLD[name]["optimizer"] in CONFIGS:
        assert next_losses(name, folder, stage, of_config=True) == pytest.approx(TOLD[name]["losses"][4:], rel=2e-6)


def test_what_is_imported_has_true_shapes_and_buffers(taken: tuple[str, Path]) -> None:
    _, folder = taken
    shapes = {entry.fqn: entry.shape for entry in open_checkpoint(folder).tensors() if entry.kind == "param"}
    assert shapes.items() >= {"0.weight": (7, 6), "0.bias": (7,), "2.weight": (3, 7)}.items()
    assert {"1.running_mean", "1.running_var"} <= {entry.fqn for entry in open_checkpoint(folder).tensors()}


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    load(read(CLIENTS / "radam2"), tmp_path / "c")
    for other in ("adamw1", "sgd2", "rmsprop3"):
        with pytest.raises(CheckpointError):
            next_losses(other, tmp_path / "c", 1)


def test_weights_alone_are_taken_on_demand(tmp_path: Path) -> None:
    load(read(CLIENTS / "adamw1").weights(), tmp_path / "c")
    reader = open_checkpoint(tmp_path / "c")
    assert {entry.kind for entry in reader.tensors()} == {"param", "buffer"}
    assert reader.scalars["counters"]["global_steps"] == 0
    assert reader.scalars["lr_scheduler"] is None


def test_a_state_that_is_no_plain_schedule_is_needed(tmp_path: Path) -> None:
    source = tmp_path / "run"
    source.mkdir()
    torch.save({"module": {"a": torch.ones(2)}, "optimizer": {"odd": 1}, "lr_scheduler": 7}, source / "x")
    (source / "x").rename(source / "mp_rank_00_model_states.pt")
    assert [each.is_needed for each in read(source).left_out] == [True, True]
