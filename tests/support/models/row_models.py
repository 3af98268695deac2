"""Models with embeddings, of which a batch uses few rows."""

from __future__ import annotations

from typing import Any

import torch
from parity_models import drawn_from
from torch import nn
from torch.nn import functional

ROWS, WIDTH = 64, 6


class Bags(nn.Module):
    """A few rows of one embedding, more of another, and a layer that no embedding is needed for."""

    def __init__(self, *, sparse: bool, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.bags = nn.EmbeddingBag(ROWS // 2, WIDTH, sparse=sparse, mode="sum")
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not len(words):
            return functional.cross_entropy(self.head(self.head.weight.new_ones(len(targets), WIDTH)), targets)
        hidden = self.words(words).mean(0) + self.bags(words[None] % (ROWS // 2))[0]
        return functional.cross_entropy(self.head(torch.tanh(hidden)).expand(len(targets), -1), targets)


def sparse_bags() -> Bags:
    with drawn_from(3):
        return Bags(sparse=True)


def dense_bags() -> Bags:
    with drawn_from(3):
        return Bags(sparse=False)


def tied_bags() -> Bags:
    with drawn_from(3):
        return Bags(sparse=False, tied=True)


def bags_loss(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    """Uneven numbers of rows, repeated ones, and none on rank 1 in the second step."""
    draw = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    words = torch.randint(0, ROWS, (1 + 2 * rank + micro,), generator=draw)
    words = words[:0] if (rank, step) == (1, 1) else torch.cat([words, words[:1]])
    loss: torch.Tensor = model(words, torch.randint(0, ROWS, (3,), generator=draw))
    return loss


def everyone(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())
