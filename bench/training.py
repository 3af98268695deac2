"""Byte-level GPT that most cases train, its text, and the trainers: `Gpt`, `Trainer`.

Imports no polyaccel: environments of peers have none.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.sizes import SEQUENCE, SHAPES

VOCABULARY = 256
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}
_CORPUS_NBYTES = 8 << 20
_MODEL_SEED, _DATA_SEED = 1234, 7

Corpus = npt.NDArray[np.uint8]


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, hidden: Tensor) -> Tensor:
        """Run the attention half. `hidden` and the result are (batch, sequence, width)."""
        batch, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        added: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + added

    def feed(self, hidden: Tensor) -> Tensor:
        """Run the MLP half."""
        added: Tensor = self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(hidden)), approximate="tanh"))
        return hidden + added

    def forward(self, hidden: Tensor) -> Tensor:
        return self.feed(self.attend(hidden))


class Gpt(nn.Module):
    """GPT with the same initial values in every process. Embedding and output are not tied, so that every library
    takes the model as it is."""

    def __init__(self, size: str) -> None:
        super().__init__()
        torch.manual_seed(_MODEL_SEED)
        layers, width, heads = SHAPES[size]
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the hidden states before the first block."""
        hidden: Tensor = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return hidden

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats a byte. `tokens` and `targets` are int64, (batch, SEQUENCE)."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return loss_of(self.head(self.norm(hidden)), targets)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in float32."""
    return functional.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))


def load_corpus() -> Corpus:
    """Return the first 8 MiB of the standard library's modules, in the order of their names."""
    parts: list[Corpus] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(np.fromfile(path, dtype=np.uint8))
        if sum(part.size for part in parts) >= _CORPUS_NBYTES:
            break
    return np.concatenate(parts)[:_CORPUS_NBYTES]


def draw_batch(corpus: Corpus, step: int, rank: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of a rank's micro-batch, the same for every variant."""
    generator = np.random.default_rng([_DATA_SEED, step, rank])
    starts = generator.integers(0, corpus.size - SEQUENCE - 1, micro_batch)
    windows: npt.NDArray[Any] = corpus[starts[:, None] + np.arange(SEQUENCE + 1)]
    batch = torch.from_numpy(windows.astype(np.int64))
    return batch[:, :-1], batch[:, 1:]


def random_words(shape: tuple[int, int], words: int, seed: int) -> Tensor:
    """Return token ids, the same for every variant."""
    return torch.randint(words, shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Trainer:
    """Model in training. `step` returns the loss, and adds the seconds of the last step to `phases`."""

    loss_of: Callable[..., Tensor]
    backward: Callable[[Tensor], object]
    update: Callable[[], object]
    subject: Any
    """The engine, or the module and its optimizer."""

    def __post_init__(self) -> None:
        self.phases: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}

    def step(self, *batch: Tensor) -> float:
        """Forward, backward and update."""
        times = [perf_counter()]
        loss = self.loss_of(*batch)
        times.append(perf_counter())
        self.backward(loss)
        times.append(perf_counter())
        self.update()
        times.append(perf_counter())
        for number, seconds in enumerate(self.phases.values()):
            seconds.append(times[number + 1] - times[number])
        return loss.item()


def engine_trainer(engine: Any, loss: Callable[..., Tensor] | None = None) -> Trainer:
    """Return the trainer of an engine of polyaccel or DeepSpeed, whose calls are the same."""
    return Trainer(loss or engine, engine.backward, engine.step, engine)


def torch_trainer(
    model: nn.Module,
    loss: Callable[..., Tensor] | None = None,
    *,
    clip: float = 1.0,
    autocast: AbstractContextManager[Any] | None = None,
    **adamw: Any,
) -> Trainer:
    """Return the trainer of a plain torch module with torch's AdamW. A `clip` of 0 is no clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), **{"fused": True, **adamw})
    cast = autocast or nullcontext()

    def forward(*batch: Tensor) -> Tensor:
        with cast:
            found: Tensor = (loss or model)(*batch)
        return found

    def update() -> None:
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Trainer(forward, torch.autograd.backward, update, (model, optimizer))


def transformers_loss(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the loss of token ids by a causal model of transformers, or by an engine around one."""

    def loss(words: Tensor) -> Tensor:
        found: Tensor = model(input_ids=words, labels=words, use_cache=False).loss
        return found

    return loss
