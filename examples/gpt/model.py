"""A byte-level GPT: one token a byte, learned positions, the input embedding tied to the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    context: int


SHAPES = {
    "tiny": Shape(layers=2, width=64, heads=2, context=64),  # 0.1 M parameters, for tests
    "mini": Shape(layers=4, width=256, heads=4, context=128),  # 3.3 M
    "small": Shape(layers=6, width=384, heads=6, context=256),  # 10.8 M
    "medium": Shape(layers=9, width=512, heads=8, context=256),  # 28.6 M
}


class Block(nn.Module):
    """Attention and a feed-forward net, each behind a norm and around a residual (GPT-2, Radford et al. 2019)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.feed_forward(self.mlp_norm(hidden))

    def feed_forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = self.mlp_out(functional.gelu(self.mlp_in(hidden), approximate="tanh"))
        return added


class Gpt(nn.Module):
    """The whole model. Its initial values are a function of torch's random state."""

    into_residual: ClassVar[tuple[str, ...]] = ("attention_out.weight", "mlp_out.weight")

    def __init__(self, shape: Shape, block: Callable[[Shape], Block] = Block) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            setattr(parameter, "use_muon", name.startswith("blocks.") and parameter.dim() > 1)  # noqa: B010
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                starts_smaller = name.endswith(self.into_residual)  # lest the residual stream grow with depth
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if starts_smaller else 0.02)

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean loss in nats a byte if there are `targets`, else logits (batch, sequence, 256) in fp32."""
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden)).float()
        if targets is None:
            return logits
        return functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, numel: int, *, context: int, device: torch.device) -> Iterator[int]:
    """`numel` bytes that follow `prompt`, drawn at temperature 0.6. `model` is in evaluation mode."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.tensor([list(prompt)], dtype=torch.int64)
    for _ in range(numel):
        logits = model(tokens[:, -context:].to(device))[0, -1].cpu()
        drawn = torch.multinomial(torch.softmax(logits / 0.6, dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn.view(1, 1)], dim=1)
        yield int(drawn)
