"""What the ranks of `replicas.py` train: a small model with dropout at stage 2, replicas of each step, and a save in
the background every few steps. Says where it begins, each step's loss to the bit, and a digest of its parameters."""

from __future__ import annotations

import os
import sys
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor, nn

import polyaccel
from polyaccel.errors import CheckpointError

WIDTH, BATCH, SAVE_EVERY = 256, 4, 5


def build() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def main() -> None:
    """`replica_ranks.py FOLDER [STEPS]`: until FOLDER/stop is there, or for so many steps."""
    folder, last = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        "checkpoint": {"in_memory": not last, "keep_last": 2},
    }
    model = build()
    engine = polyaccel.initialize(model=model, config=config)[0]
    rank, saves = engine.communicator.rank, str(folder / "saves")
    torch.manual_seed(100 + rank)
    if not last:
        try:
            engine.load_checkpoint(saves)
        except CheckpointError as error:  # the first start, or nothing was saved yet
            say("nothing:", error.message.splitlines()[0])
    say("begins", os.environ["POLYACCEL_RESTART_COUNT"] if not last else 0, engine.global_steps, os.getpid())
    while True:
        step = engine.global_steps + 1
        loss = (model_loss := engine(batch_of(step, rank)) - 1.0).square().mean()
        del model_loss
        engine.backward(loss)
        engine.step()
        say("loss", step, loss.item().hex())
        is_over = step == last if last else (folder / "stop").exists()
        if engine.communicator.broadcast_object(is_over):
            break
        if step % SAVE_EVERY == 0 and not last:
            engine.save_checkpoint(saves)
            say("saves", step)
    # Statistics of batch norm are each rank's own, and rank 0's are saved.
    values = engine.module.parameters() if rank else engine.module.state_dict().values()
    digest = blake2b(b"".join(value.detach().numpy().tobytes() for value in values))
    say("ends", engine.global_steps, digest.hexdigest()[:32])
    engine.destroy()


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # in one piece


if __name__ == "__main__":
    main()
