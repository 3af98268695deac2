"""A job for the tests: transformers' Trainer over the drop-in on this machine's device, at stages 2 and 3 in bf16."""

from __future__ import annotations

import sys
import tempfile
import traceback
from typing import Any

import torch
from train_features import build
from transformers import Trainer, TrainingArguments


def main() -> int:
    """Train at two stages."""
    failed = 0
    tokens = torch.randint(3, 503, (32, 40), generator=torch.Generator().manual_seed(0))
    rows: Any = [{"input_ids": row, "labels": row} for row in tokens]
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    for stage in (2, 3):
        config = {
            **dict.fromkeys(sizes, "auto"),
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": stage},
        }
        try:
            with tempfile.TemporaryDirectory() as folder:
                arguments = TrainingArguments(
                    output_dir=folder,
                    per_device_train_batch_size=4,
                    bf16=torch.cuda.is_available(),
                    logging_steps=1,
                    report_to=[],
                    max_steps=4,
                    save_steps=4,
                    deepspeed=config,
                )
                trainer = Trainer(model=build(), args=arguments, train_dataset=rows)
                trainer.train()
                print(stage, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], flush=True)
        except Exception:
            failed += 1
            print(f"FAILED stage {stage}\n{traceback.format_exc()}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
