"""Models in which each batch takes its own way: layer drop, early exit, images in some batches only, branches in
another order, experts chosen by data, units inside units. What the tests of ranks on different ways share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
from stage3_models import WIDTH
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Way = Any
"""What a model is told to do with a batch."""


def layers(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))


class Skipping(nn.Module):
    """Runs the layers of its way, in that order; `recompute` is how they are checkpointed."""

    def __init__(self, recompute: str | None = None) -> None:
        super().__init__()
        self.layers = layers()
        self.recompute = recompute

    def forward(self, hidden: Tensor, way: Sequence[int]) -> Tensor:
        hidden = hidden.requires_grad_(self.recompute is not None)
        for index in way:
            layer = self.layers[index]
            if self.recompute is None:
                hidden = layer(hidden)
            else:
                hidden = checkpoint(layer, hidden, use_reentrant=self.recompute == "reentrant")
        return hidden.square().mean()


class Mixed(nn.Module):
    """A tower that only batches with images go through, before a trunk that all do; tied and frozen parameters, and one
    of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.trunk = layers(2), layers(3)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.project.weight
        self.tower[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, hidden: Tensor, way: bool) -> Tensor:
        if way:
            image = hidden * 0.5
            for layer in self.tower:
                image = layer(image)
            hidden = hidden + self.project(image)
        for layer in self.trunk:
            hidden = layer(hidden)
        return (self.head(hidden) * self.scale).square().mean()


class Experts(nn.Module):
    """Experts that are units; a batch goes to those of its way, between two layers that all use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = layers(6)

    def forward(self, hidden: Tensor, way: Sequence[int]) -> Tensor:
        hidden = self.first(hidden)
        hidden = hidden + sum(self.experts[index](hidden) for index in way)
        return self.last(hidden).square().mean()


class Nested(nn.Module):
    """A unit whose parts are called by whom its way names, and a parameter that others use too."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList(Skipping() for _ in range(2))
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, way: Sequence[int]) -> Tensor:
        total = self.shared(hidden)
        for index in way:
            inner = self.outer[index % 2]
            total = total + inner.layers[index](hidden @ self.shared.weight) + inner(hidden, [index])
        return total.square().mean()


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    way: Callable[[Random, int, int], Way]
    """Of a batch, by chance, step and rank."""


def dropped(random: Random, step: int, rank: int) -> Way:
    return [index for index in range(4) if random.random() < 0.7] or [rank]


CASES: dict[str, Case] = {
    "layer drop": Case(Skipping, dropped),
    "layer drop, recomputed": Case(lambda: Skipping("non-reentrant"), dropped),
    "layer drop, recomputed inside backward": Case(lambda: Skipping("reentrant"), dropped),
    "early exit": Case(Skipping, lambda random, step, rank: list(range(random.randint(1, 4)))),
    "images on some ranks": Case(Mixed, lambda random, step, rank: random.random() < 0.5),
    "images on one rank": Case(Mixed, lambda random, step, rank: rank == 1),
    "branches in another order": Case(Skipping, lambda random, step, rank: [3, *([0, 1, 2] if rank else [2, 1, 0])]),
    "experts by data": Case(Experts, lambda random, step, rank: sorted(random.sample(range(5), 2))),
    "experts in any order": Case(Experts, lambda random, step, rank: random.sample(range(5), 2)),
    "units that are used inside others": Case(Nested, lambda random, step, rank: random.sample(range(4), 2)),
    "all alike, then not": Case(Skipping, lambda random, step, rank: [0, 3] if step == 10 and rank else [0, 1, 2, 3]),
    "all alike, then one more": Case(Skipping, lambda random, step, rank: [0, 1, 2][: 3 if step == 10 and rank else 2]),
}


def loss_of(case: Case) -> Callable[[Any, int, int, int], Tensor]:
    def loss(model: Any, step: int, micro: int, rank: int) -> Tensor:
        seed = 1000 * step + 10 * micro + rank
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        inputs = inputs.to(next(model.parameters()).dtype)
        found: Tensor = model(inputs, case.way(Random(seed), step, rank)).float()
        return found

    return loss


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad], "weight_decay": 0.0}]
