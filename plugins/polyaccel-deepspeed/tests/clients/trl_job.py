"""Supervised fine-tuning with TRL, with PEFT's LoRA or without.

`trl_job.py STAGE OUT [--lora]`; stage -1 is the same job without DeepSpeed, on one process, whose
micro-batch is that of two ranks. Rank 0 writes the losses to OUT/result.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

WORDS = [f"w{number}" for number in range(60)]
MICRO_BATCH, RANKS, STEPS = 2, 2, 4


def tokenizer() -> Any:
    known = {word: number for number, word in enumerate(["<pad>", "<eos>", *WORDS])}
    raw = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")


def build() -> GPT2LMHeadModel:
    set_seed(3)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=64, vocab_size=62, bos_token_id=1, eos_token_id=1,
                       pad_token_id=0, **none)  # fmt: skip
    return GPT2LMHeadModel(shape)


def texts(seed: int, count: int = 32) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    return [" ".join(WORDS[int(one)] for one in torch.randint(0, 60, (12,), generator=generator)) for _ in range(count)]


def training_arguments(stage: int, out: Path) -> dict[str, Any]:
    """What every trainer of TRL is given here. A negative `stage` is plain torch, one process with the batch of all."""
    is_plain = stage < 0
    zero = dict.fromkeys(
        ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
    ) | {"stage": stage}
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {
        "output_dir": str(out / "run"),
        "deepspeed": None if is_plain else {**dict.fromkeys(sizes, "auto"), "zero_optimization": zero},
        "ddp_backend": None if is_plain else "gloo",
        "use_cpu": True,
        "per_device_train_batch_size": MICRO_BATCH * (RANKS if is_plain else 1),
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "report_to": [],
        "bf16": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lora", action="store_true")
    given = parser.parse_args()
    lora = LoraConfig(r=4, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True) if given.lora else None
    data = Dataset.from_dict({"text": texts(1)})
    config = SFTConfig(max_length=32, **training_arguments(given.stage, given.out))
    job = SFTTrainer(build(), args=config, train_dataset=data, processing_class=tokenizer(), peft_config=lora)
    job.train()
    job.save_model(str(given.out / "saved"))
    losses = [entry["loss"] for entry in job.state.log_history if "loss" in entry]
    if job.is_world_process_zero():
        (given.out / "result.json").write_text(json.dumps({"losses": losses}), encoding="utf-8")


if __name__ == "__main__":
    main()
