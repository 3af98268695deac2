"""A net whose rounding errors grow from step to step: many batch norms over few values, as in MobileNetV2.

Adam makes steps of full size out of gradients that are nearly rounding errors. So two trainings in fp32 that differ in
the order of sums alone come apart (MobileNetV2 by 0.04 in a few steps). In float64 they must agree, or the difference
would be a fault.
"""

from __future__ import annotations

import pytest
import torch
from parity_models import assert_bitwise, make_config, on_threads, snapshot
from stage3_models import seeded
from torch import nn

import polyaccel

STEPS = 6


class InvertedResidual(nn.Module):
    """Expand, filter each channel by itself, and shrink, with a norm after each."""

    def __init__(self, channels):
        super().__init__()
        wide = 4 * channels
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)),
        )

    def forward(self, images):
        return images + self.layers(images)


class MobileNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU6())
        self.blocks = nn.Sequential(*(InvertedResidual(6) for _ in range(4)))
        self.head = nn.Linear(6, 5)

    def forward(self, images, labels):
        return nn.functional.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), labels)


def batch(step, rank, dtype):
    generator = torch.Generator().manual_seed(10 * step + rank)
    images = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
    return images.to(dtype), torch.randint(0, 5, (4,), generator=generator)


def trained(stage, dtype):
    """The parameters after some steps on two ranks. At stage 0 all gradients are in one bucket."""
    zero = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 0} if stage else {}
    config = make_config(stage, zero=zero, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}})

    def train(communicator, model):
        engine, *_ = polyaccel.initialize(model=model, config=config)
        for step in range(STEPS):
            engine.backward(engine(*batch(step, communicator.rank, dtype)))
            engine.step()
        engine.destroy()
        return snapshot(model)

    runs = on_threads(2, train, seeded(lambda: MobileNet().to(dtype)))
    assert_bitwise(runs[1], runs[0])
    return runs[0]


def plainly(dtype):
    """Plain torch, which sees the ranks' batches one after the other and adds their gradients in another order."""
    model = seeded(lambda: MobileNet().to(dtype))()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        for rank in range(2):
            (model(*batch(step, rank, dtype)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


def distance(found, wanted):
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


@pytest.mark.parametrize("stage", [2, 3])
def test_in_float64_nothing_is_left_of_the_difference(stage):
    wanted = plainly(torch.float64)
    assert distance(trained(stage, torch.float64), wanted) < 1e-10
    assert distance(plainly(torch.float32), wanted) > 1e-5  # plain torch itself, by rounding alone
