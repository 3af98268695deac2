"""Folders that transformers' Trainer and Accelerate write: they are named where a checkpoint of ours is asked for, and
once they are imported, training goes on with the losses that their writer had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peer_runs import AFTER, BEFORE, batch, built, importing, next_losses
from torch import nn
from torch.utils.data import DataLoader

import polyaccel
from polyaccel.checkpoint import open_checkpoint
from polyaccel.cli.main import main
from polyaccel.comm.launchers.request import VARIABLES
from polyaccel.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
LR, DECAY = 0.01, 0.1


def warming(optimizer: torch.optim.Optimizer) -> Any:
    from transformers import get_linear_schedule_with_warmup

    return get_linear_schedule_with_warmup(optimizer, 2, BEFORE + AFTER + 2)


def trainers_groups(model: nn.Module) -> list[dict[str, Any]]:
    """As the Trainer groups them: biases have no decay."""
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    return [
        {"params": [one for name, one in trained if "bias" not in name], "weight_decay": DECAY},
        {"params": [one for name, one in trained if "bias" in name], "weight_decay": 0.0},
    ]


def all_trained(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, weight_decay=DECAY)


class Losing(nn.Module):
    """The model, which gives its loss as the Trainer wants it, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        for name, part in built(0).named_children():
            self.add_module(name, part)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("offset", torch.full((3,), 0.25))
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = nn.functional.mse_loss(type(built(0)).forward(self, x), y)  # type: ignore[arg-type]
        self.losses.append(loss.item())
        return {"loss": loss}


def by_the_trainer(folder: Path) -> tuple[Path, list[float]]:
    """Eight steps of the Trainer with a checkpoint after four: its folder, and all losses."""
    from transformers import Trainer, TrainingArguments

    class Steps(Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            steps = [dict(zip(("x", "y"), batch(step), strict=True)) for step in range(BEFORE + AFTER)]
            return DataLoader(steps, batch_size=None, shuffle=False)  # type: ignore[arg-type]

    arguments = TrainingArguments(
        str(folder), max_steps=BEFORE + AFTER, save_steps=BEFORE, learning_rate=LR, weight_decay=DECAY,
        max_grad_norm=0.0, warmup_steps=2, lr_scheduler_type="linear", use_cpu=True, report_to=[], disable_tqdm=True,
        logging_steps=1000,
    )  # fmt: skip
    model = Losing()
    trainer = Steps(model, arguments)
    optimizer = adamw(trainers_groups(model))
    trainer.optimizer, trainer.lr_scheduler = optimizer, warming(optimizer)
    trainer.train()
    return folder / f"checkpoint-{BEFORE}", model.losses


def by_accelerate(folder: Path) -> tuple[Path, list[float]]:
    """Eight steps by Accelerate with its state saved after four."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Losing()
    optimizer = adamw(all_trained(model))
    prepared, optimizer, schedule = accelerator.prepare(model, optimizer, warming(optimizer))
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            accelerator.save_state(str(folder / "state"))
        accelerator.backward(prepared(*batch(step))["loss"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return folder / "state", model.losses


@pytest.mark.parametrize("write", [by_the_trainer, by_accelerate], ids=lambda write: write.__name__)
def test_training_goes_on_from_what_the_library_wrote(
    write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:  # where they find one, the libraries make a process group
        monkeypatch.delenv(name, raising=False)
    source, losses = write(tmp_path / "run")
    tool = {by_the_trainer: "Trainer", by_accelerate: "Accelerate"}[write]
    for verb in ("ls", "inspect"):
        assert main(["ckpt", verb, str(source)]) == 1
        assert tool in capsys.readouterr().err
    engine = polyaccel.initialize(model=nn.Linear(2, 1), config={"train_batch_size": 1})[0]
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(str(source))
    engine.destroy()
    assert "--from safetensors" in (caught.value.hint or "")
    assert importing(source, tmp_path / "c", "safetensors") == 0
    counters = open_checkpoint(tmp_path / "c").scalars["counters"]
    assert counters["global_steps"] == (BEFORE if write is by_the_trainer else 0)
    groups = trainers_groups if write is by_the_trainer else all_trained
    for ranks, stage in ((1, 1), (2, 3)):
        found = next_losses(tmp_path / "c", adamw, groups=groups, schedule=warming, ranks=ranks, stage=stage)
        assert found == pytest.approx(losses[BEFORE:], rel=2e-6)
