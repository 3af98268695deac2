"""The benchmarks' GPT as a list of layers, and its micro-batches. Imports no polyaccel: DeepSpeed's environment has
none."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from bench.steps.cases import SHAPES
from bench.steps.model import VOCABULARY, Corpus, Gpt, draw_batch

WARMUP = 2
RANKS = 2
LR = 1e-4
DECAY = 0.01


class Begin(nn.Module):
    """Words and their places."""

    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.tokens, self.positions = gpt.tokens, gpt.positions

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return hidden


class End(nn.Module):
    """Logits."""

    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.norm, self.head = gpt.norm, gpt.head

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def layers_of(size: str) -> list[nn.Module]:
    """The layers of the model of this size, the blocks between the first and the last."""
    gpt = Gpt(SHAPES[size])
    return [Begin(gpt), *gpt.blocks, End(gpt)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def micro_batch(corpus: Corpus, step: int, number: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one sample."""
    return draw_batch(corpus, step, number, 1)
