"""A run of plain torch that saves in the middle, and engines that go on from what it saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from parity_models import drawn_from
from torch import nn

import polyaccel
from polyaccel.cli.main import main
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.threads import run_threads

SAMPLES, BEFORE, AFTER = 6, 4, 4
Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Two layers of one shape, a scalar, a frozen layer, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.register_buffer("offset", torch.zeros(3))
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.gain * torch.tanh(self.second(torch.tanh(self.first(x)))) + self.frozen(x)
        return self.last(hidden) + self.offset


def built(seed: int) -> Net:
    with drawn_from(seed):
        return Net()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(50 + step)
    return torch.randn(SAMPLES, 5, generator=generator), torch.randn(SAMPLES, 3, generator=generator)


class PlainRun:
    """torch's own loop."""

    def __init__(self, make: Make, groups: Callable[[nn.Module], Any] = nn.Module.parameters) -> None:
        self.model = built(0)
        self.model.offset.fill_(0.25)
        self.optimizer = make(groups(self.model))
        self.schedule: Any = None

    def losses(self, steps: range) -> list[float]:
        found = []
        for step in steps:
            x, y = batch(step)
            loss = nn.functional.mse_loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            found.append(loss.item())
        return found


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with decay, and the rest without."""
    return [
        {"params": [param for param in model.parameters() if param.ndim > 1 and param.requires_grad]},
        {"params": [param for param in model.parameters() if param.ndim <= 1 and param.requires_grad], "lr": 0.003},
    ]


def importing(source: Path, folder: Path, format_name: str, *more: str) -> int:
    return main(["ckpt", "import", str(source), str(folder), "--from", format_name, *more])


def next_losses(
    folder: Path,
    make: Make | None = None,
    *,
    section: dict[str, Any] | None = None,
    groups: Callable[[nn.Module], Any] = nn.Module.parameters,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    ranks: int = 1,
    stage: int = 2,
    more: dict[str, Any] | None = None,
    **load: Any,
) -> list[float]:
    """The mean losses of an engine that goes on from `folder`, under the optimizer that `make` gives or the config's
    `section`."""

    def job(communicator: Communicator) -> list[float]:
        model = built(3)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": SAMPLES // communicator.world_size,
            "zero_optimization": {"stage": stage},
            **(more or {}),
        }
        given: dict[str, Any] = {}
        if section is not None:
            config["optimizer"] = section
            given["model_parameters"] = [*groups(model)]
        elif make is not None:
            given["optimizer"] = make(groups(model))
        if schedule is not None:
            given["lr_scheduler"] = schedule(given["optimizer"]) if "optimizer" in given else schedule
        engine = polyaccel.initialize(model=model, config=config, **given)[0]
        try:
            engine.load_checkpoint(str(folder), **load)
            rows = slice(
                *(SAMPLES // communicator.world_size * at for at in (communicator.rank, communicator.rank + 1))
            )
            losses = []
            for step in range(BEFORE, BEFORE + AFTER):
                x, y = batch(step)
                loss = nn.functional.mse_loss(engine(x[rows]), y[rows])
                engine.backward(loss)
                engine.step()
                losses.append(sum(communicator.all_gather_object(loss.item())) / communicator.world_size)
            return losses
        finally:
            engine.destroy()

    return run_threads(ranks, job)[0]
