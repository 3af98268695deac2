"""Tiny models of transformers, by kind: two layers, a few heads, no dropout, float32 from one seed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 67  # divides by no number of ranks
HIDDEN = 24
_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def _make(kind: str, **changes: Any) -> nn.Module:
    model, config = KINDS[kind]
    torch.manual_seed(7)
    transformers.utils.logging.set_verbosity_error()
    values = getattr(transformers, f"{config[0]}Config")(**config[1] | changes)
    return getattr(transformers, model)(values)  # type: ignore[no-any-return]


def transformer_model(kind: str, **changes: Any) -> nn.Module:
    """The model of a kind, with what `changes` say of its config. Weights are larger than most new models', so
    that gradients of everything count."""
    made = _make(kind, **changes)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1 and parameter.any():
                parameter.mul_(0.12 / float(parameter.std()))
            elif "norm" not in name.lower() and "ln" not in name.lower():
                parameter.normal_(0.0, 0.1)
    return made.train()


def transformer_batch(kind: str, seed: int = 0, rows: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    """Inputs and labels of a kind's model. Some labels are ignored, some inputs are padding."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    labels = words.clone()
    labels[0, 2] = -100
    mask = torch.ones_like(words)
    mask[-1, -2:] = 0
    batch = {"input_ids": words, "attention_mask": mask, "labels": labels}
    if kind == "t5":
        batch["labels"] = torch.randint(1, VOCABULARY, (rows, length - 3), generator=generator)
    return batch


def trained_plainly(
    model: nn.Module, kind: str, ranks: int, make: Callable[[Any], torch.optim.Optimizer], steps: int = 3
) -> tuple[list[list[float]], list[float], dict[str, torch.Tensor]]:
    """The losses of each data rank, the norms (clipped to 1) and the last values, of plain torch in one process. Rank r
    has the batch of seed 10 x step + r; `make` gives the optimizer of parameters."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    losses: list[list[float]] = [[] for _ in range(ranks)]
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            loss = model(**transformer_batch(kind, seed=10 * step + rank)).loss
            (loss / ranks).backward()
            losses[rank].append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return losses, norms, model.state_dict()


def step_once(engine: Any, kind: str, step: int, data_rank: int) -> float:
    """Train a step of an engine on the batch that `trained_plainly` has for the rank, and return the loss."""
    loss = engine(**transformer_batch(kind, seed=10 * step + data_rank)).loss
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def trained_by(engine: Any, kind: str, data_rank: int, steps: int = 3) -> tuple[list[float], list[float]]:
    """Return the losses of the rank and the norms of an engine that trains what `trained_plainly` does."""
    pairs = [(step_once(engine, kind, step, data_rank), engine.get_global_grad_norm()) for step in range(steps)]
    losses, norms = zip(*pairs, strict=True)
    return list(losses), list(norms)


KINDS: dict[str, tuple[str, tuple[str, dict[str, Any]]]] = {
    "llama": (
        "LlamaForCausalLM",
        ("Llama", _DECODER | {"intermediate_size": 37, "num_attention_heads": 6, "num_key_value_heads": 3}),
    ),
    "llama_two_keys": (
        "LlamaForCausalLM",
        ("Llama", _DECODER | {"intermediate_size": 37, "num_attention_heads": 8, "num_key_value_heads": 2,
                              "head_dim": 4, "attention_bias": True, "tie_word_embeddings": True}),
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        ("Qwen2", _DECODER | {"intermediate_size": 37, "num_attention_heads": 7, "num_key_value_heads": 7,
                              "hidden_size": 28}),
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        ("Qwen3", _DECODER | {"intermediate_size": 37, "num_attention_heads": 4, "num_key_value_heads": 2,
                              "head_dim": 8, "tie_word_embeddings": True}),
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        ("GPT2", {"vocab_size": VOCABULARY, "n_embd": 28, "n_layer": 2, "n_head": 7, "n_positions": 32,
                  "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}),
    ),
    "bert": (
        "BertForMaskedLM",
        ("Bert", _DECODER | {"intermediate_size": 37, "num_attention_heads": 4, "hidden_dropout_prob": 0.0,
                             "attention_probs_dropout_prob": 0.0}),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        ("T5", {"vocab_size": VOCABULARY, "d_model": HIDDEN, "d_ff": 37, "d_kv": 4, "num_layers": 2, "num_heads": 5,
                "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
                "feed_forward_proj": "gated-gelu"}),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        ("Mixtral", _DECODER | {"intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
                                "num_local_experts": 3, "num_experts_per_tok": 2, "router_jitter_noise": 0.0,
                                "output_router_logits": True}),
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        ("Qwen3Moe", _DECODER | {"intermediate_size": 37, "num_attention_heads": 4, "num_key_value_heads": 2,
                                 "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
                                 "decoder_sparse_step": 1, "mlp_only_layers": [0]}),
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        ("DeepseekV3", _DECODER | {"intermediate_size": 37, "num_attention_heads": 4, "num_key_value_heads": 4,
                                   "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
                                   "moe_intermediate_size": 20, "first_k_dense_replace": 1, "n_group": 4,
                                   "topk_group": 2, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
                                   "qk_nope_head_dim": 4, "v_head_dim": 6}),
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        ("Olmoe", _DECODER | {"intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2,
                              "num_experts": 5, "num_experts_per_tok": 3}),
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        ("GptOss", _DECODER | {"intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2,
                               "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ),
    "phi3": (
        "Phi3ForCausalLM",
        ("Phi3", _DECODER | {"intermediate_size": 37, "num_attention_heads": 6, "num_key_value_heads": 2}),
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        ("GPTNeoX", _DECODER | {"intermediate_size": 37, "num_attention_heads": 4, "hidden_dropout": 0.0}),
    ),
    "bloom": (
        "BloomForCausalLM",
        ("Bloom", {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0,
                   "attention_dropout": 0.0}),
    ),
    "mpt": (
        "MptForCausalLM",
        ("Mpt", {"vocab_size": VOCABULARY, "d_model": HIDDEN, "n_layers": 2, "n_heads": 4, "max_seq_len": 32,
                 "expansion_ratio": 2, "resid_pdrop": 0.0, "emb_pdrop": 0.0}),
    ),
    "falcon": (
        "FalconForCausalLM",
        ("Falcon", {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "multi_query": True, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    ),
    "albert": (
        "AlbertForMaskedLM",
        ("Albert", _DECODER | {"embedding_size": 16, "intermediate_size": 37, "num_attention_heads": 4,
                               "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    ),
}  # fmt: skip
