"""Train a small convolutional net on CIFAR-10, or on scikit-learn's digits where no data is given.

polyaccel run --ranks 2 examples/cifar10/train.py --data cifar-10-batches-bin
python examples/cifar10/train.py
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from images import Images, load_digits, read_cifar10
from model import ConvNet
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import polyaccel
from polyaccel import PolyaccelError, TorchEngine, comm

_TEST_BATCH = 256


def main() -> int:
    args = parse_arguments()
    try:
        train(args)
    except PolyaccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    comm.destroy_process_group()
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder cifar-10-batches-bin (default: digits)")
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="passes over the data (default: 10)")
    parser.add_argument("--fp16", action="store_true", help="train in float16 with a dynamic loss scale")
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    """Train and test. Collective."""
    splits = read_cifar10(args.data) if args.data else load_digits()
    channels, side = splits.training.images.shape[1:3]
    torch.manual_seed(1)
    engine, _, loader, _ = polyaccel.initialize(
        model=ConvNet(channels, side), training_data=TensorDataset(*splits.training), config=configured(args.fp16)
    )
    assert loader is not None  # there is training data
    for epoch in range(1, args.epochs + 1):
        engine.train()
        losses = []
        for images, labels in loader:
            loss = functional.cross_entropy(engine(inputs_of(engine, images)).float(), labels.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        comm.all_reduce(mean, op=comm.ReduceOp.AVG)
        right = accuracy(engine, splits.test)
        if comm.get_rank() == 0:
            print(f"epoch {epoch:2}/{args.epochs}  loss {float(mean):.4f}  test accuracy {right:.1%}", flush=True)
    engine.destroy()


def configured(fp16: bool) -> dict[str, Any]:
    """config.json, with its fp16 section switched."""
    config: dict[str, Any] = json.loads((Path(__file__).parent / "config.json").read_text(encoding="utf-8"))
    config["fp16"]["enabled"] = fp16
    return config


def inputs_of(engine: TorchEngine, images: torch.Tensor) -> torch.Tensor:
    """`images` on the model's device, in its element type."""
    return images.to(engine.device, next(engine.module.parameters()).dtype)


@torch.no_grad()
def accuracy(engine: TorchEngine, test: Images) -> float:
    """The share of `test` that is classified right; each rank takes its part of it. Collective."""
    engine.eval()
    rank, ranks = comm.get_rank(), comm.get_world_size()
    counts = torch.zeros(2)
    share = TensorDataset(test.images[rank::ranks], test.labels[rank::ranks])
    for images, labels in DataLoader(share, batch_size=_TEST_BATCH):
        classes = engine(inputs_of(engine, images)).argmax(dim=1).cpu()
        counts += torch.tensor([int((classes == labels).sum()), len(labels)])
    counts = counts.to(engine.device)
    comm.all_reduce(counts)
    return float(counts[0] / counts[1])


if __name__ == "__main__":
    sys.exit(main())
