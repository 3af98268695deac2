"""A training loop in plain torch, and what DeepSpeed makes of it: an engine, ZeRO stage 1, checkpoints to go on from.

deepspeed --num_gpus 2 hello_deepspeed.py --checkpoint_dir runs/hello
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, LENGTH, MICRO_BATCH = 64, 16, 8
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01, "torch_adam": True}},
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 1},
}


class Reader(nn.Module):
    """Reads tokens with an LSTM and says what comes next."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.out(self.lstm(self.embedding(tokens[:, :-1]))[0])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build() -> Reader:
    torch.manual_seed(4)
    return Reader()


def draw_batch(step: int, rank: int, size: int = MICRO_BATCH) -> Tensor:
    """Counting modulo VOCABULARY, with another start and stride for every line."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(VOCABULARY, (size, 1), generator=generator)
    strides = torch.randint(1, 4, (size, 1), generator=generator)
    return (starts + strides * torch.arange(LENGTH)) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--checkpoint_dir", default=None, help="save there every ten steps; go on from what is there")
    parser.add_argument("--losses", type=Path, help="write the mean loss of every step there")
    args = parser.parse_args()

    model = build()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    first = 0
    if args.checkpoint_dir and Path(args.checkpoint_dir, "latest").exists():
        _, state = engine.load_checkpoint(args.checkpoint_dir)
        first = state["step"]
    losses = []
    for step in range(first, args.steps):
        loss = engine(draw_batch(step, rank).to(engine.device))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / ranks)
        if args.checkpoint_dir and (step + 1) % 10 == 0:
            engine.save_checkpoint(args.checkpoint_dir, client_state={"step": step + 1})
    if rank == 0:
        print(f"steps {first + 1} to {args.steps}: loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
        if args.losses:
            args.losses.write_text(json.dumps(losses), encoding="utf-8")
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
