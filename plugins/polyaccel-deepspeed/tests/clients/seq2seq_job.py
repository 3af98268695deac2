"""transformers' Seq2SeqTrainer with `predict_with_generate`: it trains, and is scored by what it writes.

`seq2seq_job.py KIND --out DIR [--config FILE]`; KIND is `t5` or `bart`. A single process has the micro-batch of two
ranks; without `--config` it is a job of plain torch. Rank 0 writes what came out to OUT/result.json.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    EvalPrediction,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

STEPS, MICRO_BATCH, RANKS, ACCUMULATION = 60, 8, 2, 1
PAD, END, FIRST, WORDS, LONGEST = 0, 1, 2, 24, 6


class Repeated(Dataset):
    """Sentences of 5 tokens; the answer is the first one, 1 to 5 times, and an end.

    Answers are padded with a token that counts, so that all ranks' losses are means of equally many.
    """

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(FIRST, WORDS, (count, 5), generator=draw)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        times = int(tokens[0]) % 5 + 1
        answer = torch.full((LONGEST,), PAD)
        answer[:times], answer[times] = tokens[0], END
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": answer}


def build(kind: str) -> PreTrainedModel:
    set_seed(3)
    tokens = {"vocab_size": WORDS, "pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD}
    if kind == "t5":
        return T5ForConditionalGeneration(
            T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
                     feed_forward_proj="gated-gelu", **tokens)
        )  # fmt: skip
    return BartForConditionalGeneration(
        BartConfig(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
                   encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=16, dropout=0.0, bos_token_id=PAD,
                   forced_eos_token_id=None, **tokens)
    )  # fmt: skip


def words(written: Any) -> list[list[int]]:
    """Sentences without what pads them: transformers has pads of several kinds, and as many as it likes."""
    return [[int(token) for token in sentence if token not in (PAD, -100)] for sentence in written]


def exact(found: EvalPrediction) -> dict[str, float]:
    pairs = list(zip(words(found.predictions), words(found.label_ids), strict=True))
    return {"exact": sum(ours == theirs for ours, theirs in pairs) / len(pairs)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["t5", "bart"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config")
    given = parser.parse_args()
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(given.out / "run"),
        deepspeed=given.config,
        ddp_backend="gloo" if given.config else None,
        use_cpu=True,
        per_device_train_batch_size=MICRO_BATCH * RANKS // int(os.environ.get("WORLD_SIZE", 1)),
        per_device_eval_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        predict_with_generate=True,
        generation_max_length=LONGEST + 2,
        max_steps=STEPS,
        learning_rate=7e-3 if given.kind == "t5" else 1e-2,
        adam_epsilon=1e-4,
        max_grad_norm=0.5,
        average_tokens_across_devices=False,  # which would count losses twice
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=11,
        bf16=False,
    )
    trainer = Seq2SeqTrainer(
        model=build(given.kind),
        args=arguments,
        train_dataset=Repeated(STEPS * MICRO_BATCH * RANKS * ACCUMULATION, 7),
        eval_dataset=Repeated(16, 8),
        compute_metrics=exact,
    )
    trainer.train()
    evaluated = trainer.evaluate()
    some = Repeated(19, 9)
    result = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "found": [evaluated["eval_loss"], evaluated["eval_exact"]],
        # Their number is not a multiple of two ranks' micro-batches, and this Trainer keeps what fills up the last
        # ones.
        "greedy": words(trainer.predict(some).predictions)[: len(some)],
        "beams": words(trainer.predict(some, num_beams=3).predictions)[: len(some)],
    }
    if trainer.is_world_process_zero():
        (given.out / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
