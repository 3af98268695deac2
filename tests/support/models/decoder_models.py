"""Tiny decoders of transformers by kind: those of `transformer_models`, and others."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformer_models import KINDS, VOCABULARY, transformer_model

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"intermediate_size": 37, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "phi": ("Phi", {"intermediate_size": 37, "num_attention_heads": 3}),
    "opt": ("OPT", {"ffn_dim": 37, "num_attention_heads": 4, "word_embed_proj_dim": 24}),
    "gemma": (
        "Gemma",
        {"intermediate_size": 37, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "bos_token_id": 0},
    ),
}


def model_of(kind: str, **changes: Any) -> nn.Module:
    """The model of a kind in evaluation mode, with weights that show in its logits."""
    if kind in KINDS:
        return transformer_model(kind, **changes).eval()
    torch.manual_seed(7)
    name, sizes = OTHERS[kind]
    common = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 32}
    config = getattr(transformers, f"{name}Config")(**common, **sizes, **changes, pad_token_id=0, eos_token_id=0)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.dim() > 1 else 0.5, 0.15)
    return model
