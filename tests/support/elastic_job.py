"""A small training that a test kills: it says which samples each step had, and its loss, and kills itself where it is
told to.

    elastic_job.py FOLDER STEPS KILLS

KILLS is "START:RANK:EVENT:STEP,...": in that start of the job the rank ends by SIGKILL at `after STEP` (the step has
ended, and is being copied) or `within STEP` (its backward pass has ended, its update has not begun); at `lost STEP` it
ends so `within` the step, once it has killed the keeper of its host: the host is lost.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import polyaccel
from polyaccel.errors import CheckpointError

SAMPLES, BATCH = 36, 12
CONFIG: dict[str, Any] = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.05}},
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
    "checkpoint": {"in_memory": True},
}


class Numbered(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples that know their numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(number), torch.sin(torch.arange(8.0) * (number + 1))


class Model(nn.Module):
    """Remembers the numbers of the samples that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, numbers: Tensor, values: Tensor) -> Tensor:
        self.seen += numbers.tolist()
        loss: Tensor = (self.net(values) - values.roll(1, 1)).square().mean()
        return loss


def build() -> Model:
    """The same model every time."""
    torch.manual_seed(0)
    return Model()


def main() -> None:
    folder, steps, kills = sys.argv[1:4]
    torch.set_num_threads(1)
    model = build()
    engine, *_ = polyaccel.initialize(model=model, config=CONFIG, training_data=Numbered())
    rank, start = engine.communicator.rank, int(os.environ["POLYACCEL_RESTART_COUNT"])
    mine = {tuple(each.split(":")[2:]) for each in kills.split(",") if each.startswith(f"{start}:{rank}:")}
    try:
        engine.load_checkpoint(folder)
    except CheckpointError:
        assert start == 0
    print("begins", start, engine.global_steps, engine.gradient_accumulation_steps(), flush=True)
    while engine.global_steps < int(steps):
        step, losses = engine.global_steps + 1, []
        model.seen.clear()
        for micro_batch in batches_of(engine):
            loss = engine(*micro_batch)
            engine.backward(loss)
            losses.append(loss.item())
            if engine.is_gradient_accumulation_boundary() and ("within", str(step)) in mine:
                os.kill(os.getpid(), signal.SIGKILL)
            if engine.is_gradient_accumulation_boundary() and ("lost", str(step)) in mine:
                for keeper in keepers():
                    os.kill(keeper, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            engine.step()
        print("step", start, step, sum(losses) / len(losses), *model.seen, flush=True)
        if ("after", str(step)) in mine:
            os.kill(os.getpid(), signal.SIGKILL)
    engine.destroy()


def keepers() -> list[int]:
    """The keepers of this host."""
    arguments = {int(path.parent.name): path for path in Path("/proc").glob("[0-9]*/cmdline")}
    found = []
    for pid, path in arguments.items():
        with suppress(OSError):
            if b"polyaccel.job.memory_server.process\0polyaccel-keeper-" in path.read_bytes():
                found.append(pid)
    return found


def batches_of(engine: Any) -> list[Any]:
    """The micro-batches of a step, from the engine's own loader."""
    source = engine._data(None)
    return [next(source) for _ in range(engine.gradient_accumulation_steps())]


if __name__ == "__main__":
    main()
