"""Models of our own that are lists of blocks, which pass on more than one tensor."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from parity_models import drawn_from
from torch import nn


class Gate(nn.Module):
    """A block that gives a tensor, whole numbers, None and a plain value, and uses a weight that is outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.kind = "gate"

    def forward(self, x: torch.Tensor, scale: torch.Tensor, steps: Any) -> tuple[Any, ...]:
        return torch.tanh(self.layer(x)) * scale + x, torch.arange(len(x)) + steps[1], None, True


class Gates(nn.Module):
    """The norm, which comes last, is written before the blocks, and so is the weight that all blocks are given."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.gates = nn.ModuleList(Gate() for _ in range(blocks))
        self.register_buffer("calls", torch.zeros(()))
        self.dummy_inputs = torch.ones(2, 6)
        self.loss_fn = nn.functional.mse_loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert [gate.kind for gate in self.gates] == ["gate"] * len(self.gates)
        state: tuple[Any, ...] = (x, 0, None, True)
        for gate in self.gates:
            state = gate(state[0], self.scale, state)
        return self.norm(state[0]) + state[1][:, None]


@cache
def gates() -> Gates:
    with drawn_from(4):
        return Gates(4)


def pairs(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro)
    return torch.randn(2, 6, generator=generator), torch.randn(2, 6, generator=generator)


class WithLoss(nn.Module):
    """A model that computes the loss itself, for an ordinary engine."""

    def __init__(self, model: Gates) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model.loss_fn(self.model(x), labels)
