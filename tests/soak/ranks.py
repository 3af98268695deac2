"""What the ranks of both soaks train: a small language model at stage 3, parameters in host memory, optimizer states in
files. Prints a line before and after each save, and now and then what the process holds."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor, nn

import polyaccel
from polyaccel.errors import CheckpointError

VOCAB, WIDTH, DEPTH, LENGTH, BATCH = 512, 128, 6, 16, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def batch_of(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)


def held(step: int) -> str:
    """What this process holds now: memory of its own and shared memory in kB, descriptors and threads."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory = {name: int(status[key].split()[0]) for name, key in (("own", "RssAnon"), ("shared", "RssShmem"))}
    open_files, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return json.dumps({"step": step, **memory, "descriptors": open_files, "threads": threads})


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("place", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--report-every", type=int, default=100)
    args = parser.parse_args()
    offload = {"nvme_path": str(args.place / "offload")}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {"device": "cpu", **offload},
            "offload_optimizer": {"device": "nvme", **offload},
        },
    }
    torch.set_num_threads(1)
    engine = polyaccel.initialize(model=Model(), config=config)[0]
    rank, saves = engine.communicator.rank, str(args.place / "saves")
    try:
        engine.load_checkpoint(saves)
    except CheckpointError as error:  # the first start
        print("nothing to resume:", error.message.splitlines()[0], flush=True)
    print("begins", engine.global_steps, flush=True)
    ends_s = monotonic() + args.seconds
    step = engine.global_steps
    is_over = False
    while not is_over:
        step += 1
        engine.backward(engine(batch_of(step, rank)))
        engine.step()
        if step % args.report_every == 0:
            print("holds", held(step), flush=True)
            engine.eval_batch(iter([batch_of(0, rank)]))
            is_over = bool(engine.communicator.broadcast_object(monotonic() > ends_s))
        if step % args.save_every == 0:
            print("saves", step, flush=True)
            engine.save_checkpoint(saves, tag=f"turn{step // args.save_every % 2}")
            print("saved", step, flush=True)
    engine.destroy()
    sys.exit(0)


if __name__ == "__main__":
    main()
