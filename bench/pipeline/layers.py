"""The benchmarks' GPT as a list of layers, and its micro-batches. Imports no polyaccel: DeepSpeed's environment has
none."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from bench.steps.cases import SHAPES
from bench.steps.model import VOCABULARY, Block, Corpus, Gpt, draw_batch

WARMUP = 2
RANKS = 2
LR = 1e-4
DECAY = 0.01
HALVES = "-halves"
"""Behind a size: blocks are two layers each."""


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


class AttentionHalf(nn.Module):
    """The first half of a block."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.heads, self.attention_norm = block.heads, block.attention_norm
        self.qkv, self.attention_out = block.qkv, block.attention_out

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        added: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + added


class MlpHalf(nn.Module):
    """The second half of a block."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.mlp_norm, self.mlp_in, self.mlp_out = block.mlp_norm, block.mlp_in, block.mlp_out

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(hidden)), approximate="tanh"))
        return hidden + added


def layers_of(size: str, *, halves: bool = False) -> list[nn.Module]:
    """The layers of the model of this size, the blocks between the first and the last; with `halves` each as two
    layers, so that stages can be more alike."""
    gpt = Gpt(SHAPES[size])
    blocks: list[nn.Module] = list(gpt.blocks)
    if halves:
        whole = [block for block in gpt.blocks if isinstance(block, Block)]
        blocks = [half for block in whole for half in (AttentionHalf(block), MlpHalf(block))]
    return [Begin(gpt), *blocks, End(gpt)]


def partition_of(layers: Sequence[nn.Module]) -> str:
    """How PipelineModules are to deal these layers: whole blocks as many as they can, halves as many."""
    return "type:block" if any(isinstance(layer, Block) for layer in layers) else "type:half"


def first_part(layers: Sequence[nn.Module]) -> int:
    """How many layers the first of two stages has, where the number of blocks is odd one more than the second."""
    return (len(layers) - 1) // 2 + 1


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def micro_batch(corpus: Corpus, step: int, number: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one sample."""
    return draw_batch(corpus, step, number, 1)
