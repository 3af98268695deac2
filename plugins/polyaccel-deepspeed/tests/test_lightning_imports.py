"""A `.ckpt` that Lightning wrote by itself: polyaccel imports it with its optimizer, and trains on as it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import polyaccel
from polyaccel.checkpoint import open_checkpoint
from polyaccel.cli.main import main
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError
from polyaccel.testkit.ranks.threads import run_threads

BEFORE, STEPS, SAMPLES = 4, 8, 6
DATA = torch.randn(STEPS, SAMPLES, 7, generator=torch.Generator().manual_seed(5))
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))
        self.frozen = torch.nn.Linear(7, 5).requires_grad_(False)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.net(x) + self.frozen(x) - 1.0).square().mean()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decaying(optimizer), "interval": "step"}}


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [parameter for parameter in module.parameters() if parameter.requires_grad], lr=0.01, weight_decay=0.1
    )


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_training_goes_on_from_a_file_of_lightning(
    ranks: int, stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = ModelCheckpoint(tmp_path / "run", filename="{step}", save_top_k=-1, every_n_train_steps=BEFORE)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=[keeper], logger=False, enable_progress_bar=False
    )
    theirs = Module()
    trainer.fit(theirs, DataLoader(list(DATA), batch_size=None, shuffle=False))  # type: ignore[arg-type]
    file = tmp_path / "run" / f"step={BEFORE}.ckpt"
    for verb in ("ls", "inspect"):
        assert main(["ckpt", verb, str(file.parent)]) == 1
        assert "Lightning" in capsys.readouterr().err
    assert main(["ckpt", "import", str(file), str(tmp_path / "c"), "--from", "bin"]) == 0
    assert open_checkpoint(tmp_path / "c").scalars["counters"]["global_steps"] == BEFORE
    models = [Module() for _ in range(ranks)]

    def go_on(communicator: Communicator) -> list[float]:
        model = models[communicator.rank]
        optimizer = adamw(model)
        config = {"train_batch_size": SAMPLES, "zero_optimization": {"stage": stage}}
        engine, *_ = polyaccel.initialize(
            model=model, optimizer=optimizer, lr_scheduler=decaying(optimizer), config=config
        )
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(str(file.parent))
        assert "--from bin" in (caught.value.hint or "")
        engine.load_checkpoint(str(tmp_path / "c"))
        rows = SAMPLES // ranks
        losses = []
        for batch in DATA[BEFORE:]:
            loss = engine(batch[rows * communicator.rank : rows * (communicator.rank + 1)])
            engine.backward(loss)
            engine.step()
            losses.append(sum(communicator.all_gather_object(loss.item())) / ranks)
        engine.destroy()
        return losses

    assert run_threads(ranks, go_on)[0] == pytest.approx(theirs.losses[BEFORE:], rel=2e-6)
