"""A Trainer whose model comes from `from_pretrained`, is resized, trained, asked and saved: it does not refer to
polyaccel.

`--base DIR --out DIR [--config FILE] [--checkpointing reentrant] [--resume CHECKPOINT]`; rank 0 writes what came out to
OUT/result.json. A single process has the micro-batch of two ranks; without `--config` it is a job of plain torch.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from trainer_job import Tokens
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.integrations import is_deepspeed_zero3_enabled

STEPS, MICRO_BATCH, RANKS, ACCUMULATION = 4, 2, 2, 2
NEW_WORDS = 101


def build() -> LlamaForCausalLM:
    """What the jobs start from, to be saved."""
    set_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, vocab_size=97, max_position_embeddings=32, bos_token_id=0, eos_token_id=None,
                    pad_token_id=0)
    )  # fmt: skip


def loaded(model: Any) -> list[float]:
    """The norms of the weights, as the last rank sees them before there is an engine."""
    if not is_deepspeed_zero3_enabled():
        return [float(weight.norm()) for weight in model.parameters()]
    import deepspeed

    with deepspeed.zero.GatheredParameters(model.parameters()):
        seen = [float(weight.norm()) for weight in model.parameters()]
    ranks = torch.distributed.get_world_size()
    everyones: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(everyones, seen)
    last: list[float] = everyones[-1]
    return last


def texts(model: Any) -> list[list[int]]:
    """The model's output after two beginnings: each rank one, of its own length, or one rank both."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    own = []
    for number in range(rank, RANKS, ranks):
        start = Tokens(RANKS)[number]["input_ids"][None, : 4 + number]
        asked = {"max_new_tokens": 3 + 4 * number, "do_sample": False, "pad_token_id": 0}
        own.append(model.generate(start, attention_mask=torch.ones_like(start), **asked)[0].tolist())
    if ranks == 1:
        return own
    everyones: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(everyones, own)
    return [text for part in everyones for text in part]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config")
    parser.add_argument("--checkpointing", choices=["none", "reentrant", "not reentrant"], default="none")
    parser.add_argument("--resume")
    given = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    arguments = TrainingArguments(  # made before the model, so that transformers has the stage when it loads
        output_dir=str(given.out / "run"),
        deepspeed=given.config,
        ddp_backend="gloo" if given.config else None,
        use_cpu=True,
        per_device_train_batch_size=MICRO_BATCH * RANKS // ranks,
        per_device_eval_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        gradient_checkpointing=given.checkpointing != "none",
        gradient_checkpointing_kwargs={"use_reentrant": given.checkpointing == "reentrant"},
        label_smoothing_factor=0.1,
        max_steps=STEPS,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        lr_scheduler_type="linear",
        logging_steps=1,
        save_steps=2,
        report_to=[],
        seed=11,
        bf16=False,
    )
    model = AutoModelForCausalLM.from_pretrained(given.base)
    result: dict[str, Any] = {"loaded": loaded(model)}
    set_seed(5)
    model.resize_token_embeddings(NEW_WORDS)
    data = Tokens(STEPS * MICRO_BATCH * RANKS * ACCUMULATION)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=Tokens(8))
    trainer.train(resume_from_checkpoint=given.resume)
    result |= {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "eval": trainer.evaluate()["eval_loss"],
        "predicted": float(abs(trainer.predict(Tokens(8)).predictions).mean()),
        "texts": texts(trainer.model),
    }
    trainer.save_model(str(given.out / "saved"))
    if trainer.is_world_process_zero():
        (given.out / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
