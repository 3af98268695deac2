"""Small models of transformers, for tests of what is done to models that nobody wrote for it."""

from __future__ import annotations

from typing import Any

import torch
from parity_models import drawn_from
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny(kind: str, attention: str = "sdpa", dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """A model of two layers, the same weights every time, whose attention has no dropout."""
    if kind == "llama":
        config = LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **changes})
        make: Any = LlamaForCausalLM
    elif kind == "qwen2":
        config = Qwen2Config(**{**SIZES, "num_key_value_heads": 1, **changes})
        make = Qwen2ForCausalLM
    elif kind == "mistral":
        config = MistralConfig(**{**SIZES, "num_key_value_heads": 4, "sliding_window": 7, **changes})
        make = MistralForCausalLM
    elif kind == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        config = MixtralConfig(**{**SIZES, "num_key_value_heads": 2, **experts, **changes})
        make = MixtralForCausalLM
    elif kind == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": 35, "n_layer": 2, "n_head": 7, "n_positions": 128}
        dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        config = GPT2Config(**{**sizes, **dropout, "bos_token_id": 1, "eos_token_id": 2, **changes})
        make = GPT2LMHeadModel
    elif kind == "bert":
        dropout = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
        config = BertConfig(**{**SIZES, **dropout, **changes})
        make = BertForMaskedLM
    else:
        raise ValueError(f"no tiny {kind!r}")
    config._attn_implementation = attention
    with drawn_from(5):
        model: PreTrainedModel = make(config)
    return model.to(dtype)
