"""Modules that hypothesis composes of parts that break wrong cuts, trained over two tensor ranks and in plain torch.

`TESTS_GENERATED=50` composes as many; without it a few. Some parts cannot be cut and stay whole; none may be wrong.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from zoo_models import Entry, Tiny
from zoo_rows import Comparison

COUNT = int(os.environ.get("TESTS_GENERATED", "3"))
HIDDEN, INNER, HEADS, WORDS = 12, 20, 4, 23
FUSED = ("halves", "interleaved")
STATISTICS = ("softmax", "normalize", "mean", "top-k", "layer norm", "rms norm")
LEARNED = ("prelu", "prelu of features", "beta", "scale of features")
STATES = ("running mean", "counter", "noise", "dropout")
PLAIN = ("gelu", "gated")
NAMES = (("fc1", "fc2"), ("up_proj", "down_proj"), ("first", "second"))


class FeedForward(nn.Module):
    """Two layers with known or unknown names, and one kind of function between them."""

    def __init__(self, kind: str, names: tuple[str, str]) -> None:
        super().__init__()
        self.kind, self.names, self.calls = kind, names, 0
        self.add_module(names[0], nn.Linear(HIDDEN, INNER * (2 if kind in FUSED else 1)))
        self.add_module(names[1], nn.Linear(INNER, HIDDEN))
        if kind == "gated":
            self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        if kind in ("layer norm", "rms norm"):
            self.norm = nn.LayerNorm(INNER) if kind == "layer norm" else nn.RMSNorm(INNER)
        if "prelu" in kind:
            self.act = nn.PReLU(INNER if "features" in kind else 1)
        if kind == "beta":
            self.beta = nn.Parameter(torch.tensor(0.8))
        if kind == "scale of features":
            self.scale = nn.Parameter(torch.ones(INNER))
        if kind == "running mean":
            self.register_buffer("running", torch.zeros(HIDDEN))
        if kind == "counter":
            self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.dropout = nn.Dropout(0.3 if kind == "dropout" else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs."""
        h = self.between(x, getattr(self, self.names[0])(x))
        out: Tensor = getattr(self, self.names[1])(self.dropout(h))
        if self.kind == "running mean" and self.training:
            with torch.no_grad():
                self.running.lerp_(out.mean((0, 1)), 0.1)
            out = out - self.running
        if self.kind == "counter":
            self.count += 1
            out = out / (1 + 0.1 * self.count)
        return out

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        """What stands between the layers."""
        kind = self.kind
        if kind == "interleaved":
            return h[..., ::2].sigmoid() * h[..., 1::2]
        if kind == "halves":
            gate, value = h.chunk(2, -1)
            return gate.sigmoid() * value
        if kind == "gated":
            return functional.silu(self.gate_proj(x)) * h
        if kind == "softmax":
            return h.softmax(-1)
        if kind == "normalize":
            return functional.normalize(h, dim=-1)
        if kind == "mean":
            return h - h.mean(-1, keepdim=True)
        if kind == "top-k":
            return torch.where(h >= h.topk(7, -1).values[..., -1:], h, 0.0)
        if kind in ("layer norm", "rms norm"):
            return self.norm(h.tanh())  # type: ignore[no-any-return]
        if kind == "beta":
            return torch.sigmoid(h * self.beta) * h
        if kind == "scale of features":
            return h.tanh() * self.scale
        if "prelu" in kind:
            return self.act(h.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]
        if kind == "noise":  # of the inner features, the same in every run
            self.calls += 1
            return h + 0.1 * torch.randn(h.shape, generator=torch.Generator().manual_seed(self.calls))
        return functional.gelu(h)


class Attention(nn.Module):
    """Queries, keys and values of separate or fused layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.num_heads, self.head_dim = kind, HEADS, HIDDEN // HEADS
        if kind in ("thirds", "by heads"):
            self.qkv_proj = nn.Linear(HIDDEN, 3 * HIDDEN)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        if kind == "norms of heads":
            self.q_norm = nn.LayerNorm(self.head_dim)
        if kind == "temperatures":
            self.temperature = nn.Parameter(torch.linspace(0.5, 1.5, HEADS).view(HEADS, 1, 1))
        self.out_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs."""
        rows, tokens, _ = x.shape
        if self.kind == "by heads":
            parts = self.qkv_proj(x).view(rows, tokens, self.num_heads, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        elif self.kind == "thirds":
            parts = self.qkv_proj(x).view(rows, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        else:
            each = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
            parts = [one.view(rows, tokens, self.num_heads, self.head_dim).transpose(1, 2) for one in each]
        query, key, value = parts
        query = self.q_norm(query) if self.kind == "norms of heads" else query
        scores = query @ key.transpose(-1, -2)
        scores = scores * self.temperature if self.kind == "temperatures" else scores
        weights = scores.softmax(1 if self.kind == "softmax over heads" else -1)
        return self.out_proj((weights @ value).transpose(1, 2).reshape(rows, tokens, -1))  # type: ignore[no-any-return]


ATTENTIONS = ("separate", "thirds", "by heads", "norms of heads", "temperatures", "softmax over heads")


class Generated(nn.Module):
    """Words, blocks of drawn parts, and logits."""

    main_input_name = "input_ids"

    def __init__(self, parts: list[tuple[str, str, tuple[str, str]]], *, ties_words: bool, reuses: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(WORDS, HIDDEN)
        made = [(Attention(one), FeedForward(two, names)) for one, two, names in parts]
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(HIDDEN), "attention": one, "mlp": two}) for one, two in made
        )
        self.reuses = reuses
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)
        if ties_words:
            self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        """A loss."""
        x = self.words(input_ids)
        for layer in [*self.layers, *(self.layers[:1] if self.reuses else [])]:
            x = x + layer["attention"](layer["norm"](x))
            x = x + layer["mlp"](x)
        return SimpleNamespace(loss=functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


def tiny(model: nn.Module) -> Tiny:
    draw = torch.Generator().manual_seed(7)
    batches = [[torch.randint(0, WORDS, (2, 2, length), generator=draw) for length in (6, 4)] for _ in range(3)]
    steps = [[{"input_ids": both[0], "labels": both[1]} for both in step] for step in batches]
    return Tiny(Entry("generated", "module", "Generated"), model.train(), "", steps)


PARTS = st.tuples(
    st.sampled_from(ATTENTIONS), st.sampled_from(FUSED + STATISTICS + LEARNED + STATES + PLAIN), st.sampled_from(NAMES)
)


@settings(
    max_examples=COUNT,
    derandomize=True,
    phases=[Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(parts=st.lists(PARTS, min_size=1, max_size=2), ties_words=st.booleans(), reuses=st.booleans())
def test_a_generated_module_trains_as_in_plain_torch(parts: Any, ties_words: bool, reuses: bool) -> None:
    row = Comparison(tiny(Generated(parts, ties_words=ties_words, reuses=reuses))).row("tensor 2")
    # Where every part needs whole features, nothing is left to cut.
    assert row.result == "equal" or row.detail.startswith("ShardingError: nothing of"), f"{parts}: {row.detail}"
