"""Models that sharded parameters are hard on, each with its loss: what the stage 3 tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from parity_models import VOCAB, Run, assert_bitwise, batch, drawn_from
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Case(NamedTuple):
    """A model and its loss at (step, micro, rank)."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, int, int, int], Tensor]


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same model every time."""

    def rebuild() -> nn.Module:
        with drawn_from(0):
            return build()

    return rebuild


def token_loss(model: Any, step: int, micro: int, rank: int) -> Tensor:
    tokens, targets = batch(step, micro, rank)
    loss: Tensor = model(tokens[None], targets[None])
    return loss


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.narrow = nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        return hidden + self.narrow(torch.tanh(self.wide(hidden)))


class Gpt(nn.Module):
    """Embedding and head are one parameter; `scale` is the root's own, `position` is used by its parent, as is the
    frozen `shift`, and nobody uses `unused`. `recompute` is None, or how blocks are checkpointed."""

    def __init__(self, recompute: str | None = None, make_block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(6, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.unused = nn.Parameter(torch.randn(5))
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        if self.recompute is None:
            out: Tensor = block(hidden)
        else:
            out = checkpoint(block, hidden, use_reentrant=self.recompute == "reentrant")
        return out

    def logits(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.position.weight[: tokens.shape[-1]] + self.shift
        for block in self.blocks:
            hidden = self.run_block(block, hidden)
        out: Tensor = self.head(hidden * self.scale)
        return out

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.logits(tokens).float().flatten(0, 1), targets.flatten())


class Experts(nn.Module):
    """Each token goes to one of four experts by its value; a rank whose tokens miss an expert never runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        out = hidden
        for index, expert in enumerate(self.experts):
            rows = (normed.detach()[..., 0] * 3).long() % len(self.experts) == index
            if rows.any():
                out = out + torch.where(rows[..., None], torch.tanh(expert(normed)), 0.0)
        return out


class ConvNet(nn.Module):
    """Batch norm keeps running statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3))
        )
        self.head = nn.Linear(4, 3)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.body(self.stem(images)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(features).float(), labels)


def image_loss(model: Any, step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    images = torch.randn(4, 1, 5, 5, generator=generator)
    dtype = next(model.parameters()).dtype
    loss: Tensor = model(images.to(dtype), torch.randint(0, 3, (4,), generator=generator))
    return loss


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_down = nn.Linear(base.in_features, 2, bias=False)
        self.lora_up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.base(hidden) + self.lora_up(self.lora_down(hidden))
        return out


def lora() -> Gpt:
    """A frozen GPT with low-rank additions that are trained."""
    model = Gpt()
    model.requires_grad_(False)
    for block in model.blocks:
        block.wide, block.narrow = LoraLinear(block.wide), LoraLinear(block.narrow)
    return model


class Wandering(Gpt):
    """Runs its first block twice, its second only in even steps, and the third for one rank's data scaled by itself."""

    steps = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        order = [0, 0, 1, 2] if self.steps % 2 == 0 else [2, 0, 0]
        for index in order:
            hidden = self.run_block(self.blocks[index], hidden)
        self.steps += 1
        return nn.functional.cross_entropy(self.head(hidden * self.scale).float().flatten(0, 1), targets.flatten())


CASES: dict[str, Case] = {
    "gpt": Case(seeded(Gpt), token_loss),
    "reentrant": Case(seeded(lambda: Gpt("reentrant")), token_loss),
    "recomputed": Case(seeded(lambda: Gpt("non-reentrant")), token_loss),
    "conv": Case(seeded(ConvNet), image_loss),
    "experts": Case(seeded(lambda: Gpt(make_block=Experts)), token_loss),
    "lora": Case(seeded(lora), token_loss),
    "wandering": Case(seeded(Wandering), token_loss),
}


def assert_same_run(found: Run, wanted: Run) -> None:
    assert_bitwise(found.params, wanted.params)
    assert found.norms == wanted.norms
    assert found.losses == wanted.losses
