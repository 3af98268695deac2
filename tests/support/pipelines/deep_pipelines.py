"""A model of layers for many chunks: tied words, norms, and dropout that follows from what passes: every layer passes
on the number from which its micro-batch's masks are made."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from pipeline_models import VOCABULARY
from torch import Tensor, nn

from polyaccel.torch.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

WIDTH = 6
BLOCKS = 8
LAYERS = BLOCKS + 2


class Block(nn.Module):
    """A residual layer with a mask of its own for each micro-batch, the same on any rank and in any recomputation."""

    def __init__(self, number: int, drops: float) -> None:
        super().__init__()
        self.number, self.drops = number, drops
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH, bias=number % 2 == 0)

    def forward(self, hidden: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        added = self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        if self.drops:
            generator = torch.Generator().manual_seed(int(seed) * 100 + self.number)
            added = added * (torch.rand(added.shape, generator=generator) >= self.drops)
        return hidden + added, seed


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, words: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.embedding(words, self.weight), seed


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, hidden: Tensor, seed: Tensor) -> Tensor:
        return hidden @ self.weight.t()


with torch.random.fork_rng():  # here, for ranks that are threads have one generator
    torch.manual_seed(4)
    _BLOCKS = [Block(number, 0.0) for number in range(BLOCKS)]
    _WORDS, _LOGITS = Words(), Logits()


def _tied_logits(module: Words, given: tuple[Tensor, Tensor]) -> Tensor:
    return given[0] @ module.weight.t()


def _block(number: int, drops: float) -> nn.Module:
    block = deepcopy(_BLOCKS[number])
    block.drops = drops
    return block


def deep_model(stages: int, *, tied: bool = False, drops: float = 0.0, **changes: Any) -> PipelineModule:
    """Ten layers over the chunks of a schedule."""
    first: list[Any]
    if tied:
        first = [TiedLayerSpec("words", deepcopy, _WORDS)]
        last = [TiedLayerSpec("words", deepcopy, _WORDS, forward_fn=_tied_logits)]
    else:
        first, last = [LayerSpec(deepcopy, _WORDS)], [LayerSpec(deepcopy, _LOGITS)]
    blocks = [LayerSpec(partial(_block, number, drops)) for number in range(BLOCKS)]
    loss = nn.functional.cross_entropy
    return PipelineModule([*first, *blocks, *last], stages, loss_fn=loss, partition_method="uniform", **changes)


def numbered_words(step: int, micro: int, rank: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Inputs and labels of a micro-batch, with the number that its masks are made from."""
    number = 1000 * step + 10 * micro + rank
    generator = torch.Generator().manual_seed(number)
    words, labels = (torch.randint(0, VOCABULARY, (5,), generator=generator) for _ in range(2))
    return (words, torch.tensor(number)), labels
