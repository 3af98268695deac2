"""Train a small net on images like CIFAR-10's, by a script that knows nothing but DeepSpeed's API.

deepspeed --num_gpus 2 cifar10_deepspeed.py --deepspeed --deepspeed_config cifar10_config.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

CLASSES, SIDE, IMAGES = 10, 32, 512


class Net(nn.Module):
    """Two convolutions with pooling, three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Sequential(
            nn.Linear(16 * 5 * 5, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)
        )

    def forward(self, images: Tensor) -> Tensor:
        maps = self.pool(functional.relu(self.first(images)))
        maps = self.pool(functional.relu(self.second(maps)))
        logits: Tensor = self.head(maps.flatten(1))
        return logits


def build() -> Net:
    torch.manual_seed(1)
    return Net()


def prepare(file: Path) -> Dataset[tuple[Tensor, ...]]:
    """The images and labels of `file`, which is made if it is not there: ten patterns under noise."""
    if not file.exists():
        generator = torch.Generator().manual_seed(3)
        patterns = torch.randn(CLASSES, 3, SIDE, SIDE, generator=generator)
        labels = torch.randint(CLASSES, (IMAGES,), generator=generator)
        images = patterns[labels] + torch.randn(IMAGES, 3, SIDE, SIDE, generator=generator)
        torch.save([images, labels], file)
    return TensorDataset(*torch.load(file, weights_only=True))


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(images), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--data", type=Path, default=Path("images.pt"), help="made if it is not there")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=None, help="end each epoch early")
    parser.add_argument("--losses", type=Path, help="write the mean loss of every step there")
    args = deepspeed.add_config_arguments(parser).parse_args()

    deepspeed.init_distributed()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank != 0:  # rank 0 makes the data first, the others find them
        torch.distributed.barrier()
    data = prepare(args.data)
    if rank == 0:
        torch.distributed.barrier()

    model = build()
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    device = deepspeed.get_accelerator().device_name(engine.local_rank)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, ranks, rank, seed=5)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(loader):
            if step == args.steps:
                break
            loss = loss_of(engine, images.to(device), labels.to(device))
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            losses.append(mean.item() / ranks)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}", flush=True)
    if rank == 0 and args.losses:
        args.losses.write_text(json.dumps(losses), encoding="utf-8")
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
