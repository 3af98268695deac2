"""Small models by kind, whose blocks have known names and do not all compute the same when ranks cut them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, HIDDEN, INNER, HEADS = 37, 16, 24, 4
SHARED = ("prelu", "beta")
"""A parameter between the layers that are cut."""
LAYOUTS = ("interleaved gates", "by heads", "halves")
"""Fused layers."""
STATISTICS = ("softmax", "normalize", "mean", "top-k", "softmax over heads")
"""A number that needs the features of all ranks."""


class FeedForward(nn.Module):
    """`fc1` and `fc2`, and a kind of function between them."""

    def __init__(self, kind: str, inner: int = INNER) -> None:
        super().__init__()
        self.kind = kind
        self.fc1 = nn.Linear(HIDDEN, inner * (2 if kind in ("interleaved gates", "halves") else 1))
        self.fc2 = nn.Linear(inner, HIDDEN)
        self.act = nn.PReLU(inner if kind == "prelu of features" else 1) if "prelu" in kind else nn.Tanh()
        self.beta = nn.Parameter(torch.tensor(0.8)) if kind == "beta" else 1.0

    def forward(self, x: Tensor) -> Tensor:
        """The outputs."""
        return self.fc2(self.between(self.fc1(x)))  # type: ignore[no-any-return]

    def between(self, h: Tensor) -> Tensor:
        """What stands between the layers."""
        if self.kind == "interleaved gates":
            return h[..., ::2].sigmoid() * h[..., 1::2]
        if self.kind == "halves":
            gate, value = h.chunk(2, -1)
            return gate.sigmoid() * value
        if self.kind == "softmax":
            return h.softmax(-1)
        if self.kind == "normalize":
            return functional.normalize(h, dim=-1)
        if self.kind == "mean":
            return h - h.mean(-1, keepdim=True)
        if self.kind == "top-k":
            return torch.where(h >= h.topk(8, -1).values[..., -1:], h, 0.0)
        if self.kind == "beta":
            return torch.sigmoid(h * self.beta) * h
        if self.kind == "prelu of features":
            return self.act(h.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]
        return self.act(h)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """`qkv_proj` and `out_proj`: queries, keys and values one after another, or of each head together."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.num_heads, self.head_dim = kind, HEADS, HIDDEN // HEADS
        self.qkv_proj = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs."""
        rows, tokens, _ = x.shape
        fused = self.qkv_proj(x)
        if self.kind == "by heads":
            parts = fused.view(rows, tokens, self.num_heads, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        else:
            parts = fused.view(rows, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        weights = (query @ key.transpose(-1, -2)).softmax(1 if self.kind == "softmax over heads" else -1)
        return self.out_proj((weights @ value).transpose(1, 2).reshape(rows, tokens, -1))  # type: ignore[no-any-return]


class CutBlocks(nn.Module):
    """Two layers of attention and feed-forward blocks of one kind, from words to logits."""

    def __init__(self, kind: str, inner: int = INNER) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(VOCABULARY, HIDDEN)
        parts = [(Attention(kind), FeedForward(kind, inner)) for _ in range(2)]
        self.layers = nn.ModuleList(nn.ModuleDict({"attention": one, "mlp": other}) for one, other in parts)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer["attention"](x)
            x = x + layer["mlp"](x)
        return self.head(x)  # type: ignore[no-any-return]


_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": HIDDEN, "decoder_layers": 2, "decoder_attention_heads": HEADS,
    "decoder_ffn_dim": INNER, "max_position_embeddings": 32, "dropout": 0.0,
}  # fmt: skip
_GPT: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_positions": 32, "resid_pdrop": 0.0,
                        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "apertus": ("ApertusForCausalLM", "ApertusConfig", _DECODER),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**_GPT, "n_head": 8, "rotary_dim": 4, "n_ctx": 32}),
    "codegen of 4 heads": ("CodeGenForCausalLM", "CodeGenConfig", {**_GPT, "n_head": 4, "rotary_dim": 4, "n_ctx": 32}),
    "bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**_GPT, "n_head": 4}),
    "bigcode of all keys": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**_GPT, "n_head": 4, "multi_query": False}),
    "xglm": (
        "XGLMForCausalLM",
        "XGLMConfig",
        {"vocab_size": VOCABULARY, "d_model": HIDDEN, "num_layers": 2, "attention_heads": HEADS, "ffn_dim": INNER,
         "max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "trocr": ("TrOCRForCausalLM", "TrOCRConfig", {**_BART, "cross_attention_hidden_size": HIDDEN}),
    "mvp": ("MvpForCausalLM", "MvpConfig", _BART),
    "doge": ("DogeForCausalLM", "DogeConfig", {**_DECODER, "num_key_value_heads": 2}),
    "gemma3n": (
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {**_DECODER, "num_key_value_heads": 2, "head_dim": 8, "vocab_size_per_layer_input": VOCABULARY,
         "hidden_size_per_layer_input": 8, "laurel_rank": 4, "num_kv_shared_layers": 0, "sliding_window": 8,
         "layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.95, 0.0],
         "altup_num_inputs": 2},
    ),
}  # fmt: skip


def cut_model(kind: str) -> nn.Module:
    """The model of a kind: of transformers, or `CutBlocks`."""
    if kind not in TRANSFORMERS:
        return CutBlocks(kind)
    name, config, values = TRANSFORMERS[kind]
    torch.manual_seed(3)
    transformers.utils.logging.set_verbosity_error()
    made: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**values))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1 and parameter.any():
                parameter.mul_(0.2 / float(parameter.std()))
    return made.train()
