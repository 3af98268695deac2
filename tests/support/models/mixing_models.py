"""Models of transformers whose tokens interact in some place other than attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hf_models import tiny
from torch import Tensor, nn
from torch.nn import functional
from transformers import MobileBertConfig, MobileBertForMaskedLM, PreTrainedModel

WORDS = 61


def shifted(x: Tensor) -> Tensor:
    """The token before each, as RWKV has it."""
    return functional.pad(x[:, :-1], (0, 0, 1, 0))


JOINS: dict[str, Callable[[Tensor], Tensor]] = {
    "shift": lambda x: x + 0.5 * shifted(x),
    "difference": lambda x: x - x.roll(1, 1),
    "cumulative mean": lambda x: x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None],
    "pooling": lambda x: x + functional.avg_pool1d(x.mT, 2, ceil_mode=True).mT.repeat_interleave(2, 1)[:, : x.shape[1]],
    "mean of all": lambda x: x + x.mean(1, keepdim=True),
    "own places": lambda x: x + torch.arange(x.shape[1]).cos()[:, None],
}


class Joined(nn.Module):
    """A module, with tokens joined in what it gives."""

    def __init__(self, inner: nn.Module, join: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.join = inner, join

    def forward(self, *args: Any, **named: Any) -> Any:
        """The outputs, of which the first are those of tokens."""
        out = self.inner(*args, **named)
        return (self.join(out[0]), *out[1:]) if isinstance(out, tuple) else self.join(out)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class CausalConv(nn.Module):
    """A convolution of each token with the two before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 1, 3, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        width, padded = x.shape[-1], functional.pad(x.mT, (2, 0))
        return x + functional.conv1d(padded, self.weight.to(x.dtype), groups=width).mT


class Bigrams(nn.Module):
    """Embeddings of words, and of pairs of neighbours."""

    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words, self.pairs = words, nn.Embedding(WORDS, 32)

    def forward(self, ids: Tensor) -> Tensor:
        """The sum of both."""
        before = functional.pad(ids[:, :-1], (1, 0))
        out: Tensor = self.words(ids)
        return out + self.pairs((ids * 7 + before) % WORDS).to(out.dtype)


class ShiftedMlp(nn.Module):
    """A feed-forward layer with the token before each: none but linear layers and an activation is a module."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width)

    def forward(self, x: Tensor) -> Tensor:
        """The layer."""
        out: Tensor = self.down(self.act(self.up(x + shifted(x))))
        return out


PLACES = ("model.embed_tokens", "model.layers.1", "model.layers.0.self_attn", "model.norm")
CASES = {
    **{
        f"{name} after {place}": (name, place) for at, name in enumerate(JOINS) for place in (PLACES[at % len(PLACES)],)
    },
    **{f"convolution after {place}": ("convolution", place) for place in PLACES[::2] + PLACES[3:]},
    "bigrams": ("bigrams", "model.embed_tokens"),
    "shift in a feed-forward layer": ("mlp", "model.layers.0.mlp"),
    "MobileBERT": ("mobilebert", "mobilebert.embeddings"),
}
"""What joins tokens, and the module that does."""


def mixing(case: str) -> PreTrainedModel:
    """A model of `CASES`."""
    kind, place = CASES[case]
    if kind == "mobilebert":
        return mobilebert()
    model = tiny("llama")
    inner, parent = model.get_submodule(place), model.get_submodule(place.rpartition(".")[0])
    torch.manual_seed(7)
    made: nn.Module
    if kind == "bigrams":
        made = Bigrams(inner)
    elif kind == "mlp":
        made = ShiftedMlp()
    else:
        made = Joined(inner, CausalConv(32) if kind == "convolution" else JOINS[kind])
    setattr(parent, place.rpartition(".")[2], made.double())
    return model


def mobilebert() -> PreTrainedModel:
    """A model that embeds each token with its neighbours."""
    sizes: dict[str, Any] = {
        "vocab_size": WORDS, "hidden_size": 32, "embedding_size": 24, "true_hidden_size": 16,
        "intra_bottleneck_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_feedforward_networks": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    torch.manual_seed(7)
    return MobileBertForMaskedLM(MobileBertConfig(**sizes)).double()
