"""A job that trains on a Mosaic stream and prints the samples of its rank: folder, checkpoint, first and last step."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import torch
from torch import nn

import polyaccel
from polyaccel import comm

BATCH = 8
mosaic: Any = import_module("streaming")  # which has its own environment


def main(folder: str, saved: str, first: int, last: int) -> None:
    polyaccel.init_distributed()
    micro_batch = BATCH // comm.get_world_size()
    stream = mosaic.StreamingDataset(
        local=folder, shuffle=True, shuffle_seed=3, batch_size=micro_batch, num_canonical_nodes=1
    )
    loader = mosaic.StreamingDataLoader(stream, batch_size=micro_batch, drop_last=True)
    loader.state_is_shared = True
    config = {"train_batch_size": BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    engine = polyaccel.initialize(model=nn.Linear(1, 1), training_data=loader, config=config)[0]
    if first:
        engine.load_checkpoint(saved)
    batches, seen = iter(engine.training_dataloader), []
    for _ in range(first, last):
        numbers = next(batches)["number"]
        seen.append(numbers.tolist())
        engine.backward(engine(numbers.reshape(-1, 1).to(torch.float32)).square().mean())
        engine.step()
    if not first:
        engine.save_checkpoint(saved)
    print("seen", json.dumps([comm.get_rank(), seen]), flush=True)
    engine.destroy()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
