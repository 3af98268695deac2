"""The byte-level GPT that every variant trains, and the text it trains on: that of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.steps.cases import SEQUENCE, Shape

VOCABULARY = 256
_CORPUS_NBYTES = 8 << 20
_MODEL_SEED, _DATA_SEED = 1234, 7

Corpus = npt.NDArray[np.uint8]


class Block(nn.Module):
    """Attention and a feed-forward net, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` and the result are (batch, sequence, width)."""
        batch, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(hidden)), approximate="tanh"))
        return hidden + added


class Gpt(nn.Module):
    """The same initial values in every process and every variant. Embedding and output are not tied, so that every
    library takes the model as it is."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(_MODEL_SEED)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, shape.width), nn.Embedding(SEQUENCE, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss in nats a byte. `tokens` and `targets` are int64, (batch, SEQUENCE)."""
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden)).float()
        loss: Tensor = functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))
        return loss


def load_corpus() -> Corpus:
    """The first 8 MiB of the standard library's modules, in the order of their names."""
    parts: list[Corpus] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(np.fromfile(path, dtype=np.uint8))
        if sum(part.size for part in parts) >= _CORPUS_NBYTES:
            break
    return np.concatenate(parts)[:_CORPUS_NBYTES]


def draw_batch(corpus: Corpus, step: int, rank: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a rank's micro-batch, the same for every variant."""
    generator = np.random.default_rng([_DATA_SEED, step, rank])
    starts = generator.integers(0, corpus.size - SEQUENCE - 1, micro_batch)
    windows: npt.NDArray[Any] = corpus[starts[:, None] + np.arange(SEQUENCE + 1)]
    batch = torch.from_numpy(windows.astype(np.int64))
    return batch[:, :-1], batch[:, 1:]
