"""The GPT of examples/gpt with a mixture of experts in place of each feed-forward net: as much computation for a token,
more parameters."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from polyaccel.torch.experts import Mixture, MixtureOutput

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpt"))  # the dense model, and its data

from model import Block, Gpt, Shape

CHOICES = 2
"""Experts of each token."""


class MixtureBlock(Block):
    """A block of the GPT whose feed-forward net is `experts` small ones, of which a token has two."""

    def __init__(self, shape: Shape, experts: int) -> None:
        super().__init__(shape)
        del self.mlp_in, self.mlp_out
        inner = expert_width(shape.width, experts)
        self.mixture = Mixture(shape.width, partial(_expert, shape, inner), experts, k=CHOICES, balance_weight=0.01)
        self.loss: Tensor | None = None
        """What the gate lost in the last pass."""

    def feed_forward(self, hidden: Tensor) -> Tensor:
        found: MixtureOutput = self.mixture(hidden)
        self.loss = found.loss
        return found.output


class MixtureGpt(Gpt):
    """The GPT of `MixtureBlock`s. In training its loss has the gates' in it."""

    into_residual = (*Gpt.into_residual, "experts.2_weight")

    def __init__(self, shape: Shape, experts: int) -> None:
        super().__init__(shape, partial(MixtureBlock, experts=experts))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        loss = super().forward(tokens, targets)
        for block in self.blocks:
            assert isinstance(block, MixtureBlock)  # made above
            if self.training and targets is not None and block.loss is not None:
                loss = loss + block.loss
            block.loss = None
        return loss


def expert_width(width: int, experts: int) -> int:
    """Features inside an expert, with which a token's two, and the router, have no more parameters than the dense net
    (8 `width` squared and 5 `width`), in multiples of four."""
    dense = 8 * width * width + 5 * width
    inner = (dense - experts * width - CHOICES * width) // (CHOICES * (2 * width + 1))
    return inner // 4 * 4


def active_numel(model: Gpt) -> int:
    """The parameters that a token meets."""
    idle = 0
    for block in model.blocks:
        if isinstance(block, MixtureBlock):
            of_experts = sum(one.numel() for one in block.mixture.experts.parameters())
            idle += of_experts - of_experts * CHOICES // block.mixture.num_experts
    return model.numel - idle


def _expert(shape: Shape, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape.width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, shape.width))
