"""A model for replica groups that train apart, and DiLoCo of it in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import polyaccel

Config = dict[str, Any]


class Model(nn.Module):
    """Uneven layers, a tied weight, a frozen one and one that no batch reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 7)
        self.third = nn.Linear(7, 3, bias=False)
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.second.weight
        self.fixed = nn.Linear(3, 3)
        self.fixed.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(value)))
        return self.fixed(self.third(torch.tanh(self.tied(hidden))))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    return (model(value) - value[:, :3]).square().mean()


@dataclass
class Outer:
    """How groups meet."""

    every: int = 3
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0

    @property
    def section(self) -> Config:
        optimizer = {"lr": self.lr, "momentum": self.momentum, "nesterov": self.nesterov}
        return {"sync_every": self.every, "outer_optimizer": optimizer, "fragments": self.fragments} | {
            "fragment_sync_delay": self.delay,
            "fragment_update_alpha": self.alpha,
        }


def train_plainly(
    groups: int, ranks: int, steps: int, outer: Outer, parts: Mapping[str, int] = MappingProxyType({})
) -> list[dict[str, Tensor]]:
    """DiLoCo as its papers have it, all groups in one process: the weights of each group. `parts` has each parameter's
    fragment."""
    offsets = [outer.every * parts.get(name, 0) // outer.fragments for name in names_of_trained(build())]
    first = build()
    models = [deepcopy(first) for _ in range(groups)]
    inner = [torch.optim.AdamW(trained(model), lr=0.02, weight_decay=0.1) for model in models]
    shared = [one.detach().clone() for one in trained(first)]
    momenta = [torch.zeros_like(one) for one in shared]
    sent: dict[tuple[int, int], Tensor] = {}
    for step in range(1, steps + 1):
        for group, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            optimizer.zero_grad()
            for rank in range(ranks):
                (loss_of(model, batch(step, group * ranks + rank)) / ranks).backward()
            optimizer.step()
        for index, offset in enumerate(offsets):
            if step > offset and (step - offset) % outer.every == 0:
                moved = [shared[index] - trained(model)[index].detach() for model in models]
                sent[step + outer.delay, index] = torch.stack(moved).mean(0)
            gradient = sent.pop((step, index), None)
            if gradient is None:
                continue
            momenta[index].mul_(outer.momentum).add_(gradient)
            direction = gradient + outer.momentum * momenta[index] if outer.nesterov else momenta[index]
            shared[index] = shared[index] - outer.lr * direction
            for model in models:
                own = trained(model)[index]
                own.data.copy_(outer.alpha * own.detach() + (1 - outer.alpha) * shared[index])
    return [{name: one.detach().clone() for name, one in model.named_parameters()} for model in models]


def build() -> Model:
    torch.manual_seed(3)
    return Model()


def names_of_trained(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_parameters() if one.requires_grad and name != "unused"]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [model.get_parameter(name) for name in names_of_trained(model)]


def make_config(stage: int, groups: int, section: Config, **more: Any) -> Config:
    optimizer = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}
    zero = {"stage": stage, "reduce_bucket_size": 60, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": optimizer,
        "zero_optimization": zero,
        "diloco": {"replica_groups": groups, **section},
        **more,
    }


def run_steps(engine: Any, first: int, last: int) -> None:
    rank = polyaccel.comm.get_rank()
    for step in range(first, last + 1):
        engine.backward(loss_of(engine, batch(step, rank)))
        engine.step()


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.module_state_dict().items()}
