"""Tiny models of transformers, their tokenizer, and the drawn words that it knows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

CHAT = (
    "{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
)
"""A template of Llama 3's form, whose marks EAGLE looks for."""
WORDS = "the a small large red blue model rank loss step data house tree river runs reads writes sees finds keeps"


def sentence(generator: random.Random, words: int = 8) -> str:
    """Drawn words."""
    return " ".join(generator.choice(WORDS.split()) for _ in range(words))


def model(folder: Path, kind: str) -> None:
    """A model of transformers with a tokenizer, in the folder `stand_in_KIND`. `NAME=KIND` gives the folder's name."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    generator = random.Random(5)
    name, _, other = kind.partition("=")
    place = folder / f"stand_in_{name}"
    kind = other or name
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([sentence(generator) for _ in range(100)], trainer)
    marks: dict[str, Any] = {
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "model_max_length": 64,
    }
    if name == "vicuna":  # as Llama's first tokenizer does it; FastChat counts on it
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    if name == "codet5":  # as T5's
        raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **marks)
    if name == "llama3":
        tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(place)
    torch.manual_seed(11)
    config = _config(transformers, kind)
    built = getattr(transformers, config.architectures[0])(config)
    built.save_pretrained(place)


def _config(transformers: Any, kind: str) -> Any:
    shared: dict[str, Any] = {"vocab_size": 320, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind in ("llama", "llama3", "vicuna"):
        return transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            max_position_embeddings=512, architectures=["LlamaForCausalLM"], **shared,
        )  # fmt: skip
    if kind == "opt":
        return transformers.OPTConfig(
            hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
            word_embed_proj_dim=32, architectures=["OPTForCausalLM"], **shared,
        )  # fmt: skip
    quiet: Any = 0.0 if kind.endswith("_quiet") else 0.1  # of dropout, which ranks that share a model draw otherwise
    if kind.startswith("gpt2"):
        return transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=128, architectures=["GPT2LMHeadModel"], **shared,
            resid_pdrop=quiet, embd_pdrop=quiet, attn_pdrop=quiet,
        )  # fmt: skip
    if kind == "neox":
        return transformers.GPTNeoXConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=256, architectures=["GPTNeoXForCausalLM"], **shared,
        )  # fmt: skip
    if kind == "qwen2":
        return transformers.Qwen2Config(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=256, architectures=["Qwen2ForCausalLM"], **shared,
        )  # fmt: skip
    if kind in ("t5", "t5_quiet", "switch_quiet"):
        sizes: dict[str, Any] = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}
        marks = {"vocab_size": 320, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
        if kind == "switch_quiet":
            return transformers.SwitchTransformersConfig(
                **sizes, **marks, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
                expert_capacity=64, router_jitter_noise=0.0, dropout_rate=quiet,
                architectures=["SwitchTransformersForConditionalGeneration"],
            )  # fmt: skip
        return transformers.T5Config(**sizes, **marks, dropout_rate=quiet, architectures=["T5ForConditionalGeneration"])
    if kind == "deepseek":
        return transformers.DeepseekV2Config(
            hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1,
            topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=None, qk_nope_head_dim=8,
            qk_rope_head_dim=4, v_head_dim=8, topk_method="greedy", architectures=["DeepseekV2ForCausalLM"], **shared,
        )  # fmt: skip
    if kind == "mixtral":
        return transformers.MixtralConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=512,
            architectures=["MixtralForCausalLM"], **shared,
        )  # fmt: skip
    if kind in ("bert", "bert_quiet"):
        return transformers.BertConfig(
            vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            hidden_dropout_prob=quiet, attention_probs_dropout_prob=quiet,
            architectures=["BertForSequenceClassification"],
        )  # fmt: skip
    if kind == "roberta":
        return transformers.RobertaConfig(
            vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            pad_token_id=0, architectures=["RobertaForMaskedLM"],
        )  # fmt: skip
    raise KeyError(f"no stand-in model of this name: {kind}")
