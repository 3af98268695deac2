"""Fine-tune a causal language model by the Trainer of transformers, with a config of DeepSpeed.

    pip install ./plugins/polyaccel-deepspeed
    polyaccel run --ranks 2 examples/hf_finetune/trainer.py

The package takes the place of `deepspeed`: the Trainer needs no change.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from train import load
from transformers import Trainer, TrainingArguments

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a folder or a Hub id (default: a tiny Llama with random weights)")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to train on (default: this file)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/hf_finetune", help="where the Trainer writes")
    args = parser.parse_args()

    is_on_cpu = not torch.accelerator.is_available()
    settings = TrainingArguments(
        output_dir=args.out,
        deepspeed=CONFIG,
        use_cpu=is_on_cpu,
        ddp_backend="gloo" if is_on_cpu else None,
        max_steps=args.steps,
        per_device_train_batch_size=2,
        learning_rate=1e-4,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
    )
    model, tokens = load(args.model, args.text.read_text(encoding="utf-8"))
    rows = torch.tensor(tokens[: len(tokens) // args.length * args.length]).view(-1, args.length)
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model=model, args=settings, train_dataset=data).train()


if __name__ == "__main__":
    main()
