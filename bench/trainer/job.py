"""A job of transformers' Trainer as its users write one: a GPT-2, a DeepSpeed config, two CPU ranks under torchrun.

It knows nothing of polyaccel: which `deepspeed` it trains with is what its Python imports.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

SEQUENCE, VOCABULARY = 128, 256
LAYERS, WIDTH, HEADS = 9, 512, 8


class Text(Dataset[dict[str, Tensor]]):
    """Windows of random bytes, with themselves as labels."""

    def __init__(self, windows: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self._tokens = torch.randint(VOCABULARY, (windows, SEQUENCE), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


class Clock(TrainerCallback):
    """Seconds of each optimizer step, and the losses that are logged."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, *args: Any, **named: Any) -> None:
        self._began = perf_counter()

    def on_step_end(self, *args: Any, **named: Any) -> None:
        self.seconds.append(perf_counter() - self._began)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def config(stage: int) -> dict[str, Any]:
    """What people write: sizes and precision are the Trainer's to fill in."""
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    return {
        **dict.fromkeys(sizes, "auto"),
        "optimizer": {"type": "AdamW", "params": auto},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=WIDTH, n_layer=given.layers, n_head=HEADS,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    clock = Clock()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(given.out.parent / "run"),
            max_steps=given.steps,
            per_device_train_batch_size=given.micro_batch,
            bf16=given.dtype == "bf16",
            deepspeed=config(given.stage),
            learning_rate=3e-4,
            use_cpu=True,
            ddp_backend="gloo",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=1,
        ),
        train_dataset=Text(given.steps * given.micro_batch * 2),
        callbacks=[clock],
    )
    trainer.train()
    if trainer.args.process_index == 0:
        found = {
            "seconds": clock.seconds,
            "losses": clock.losses,
            "deepspeed": version("deepspeed"),
            "parameters": sum(_numel(model)),
        }
        given.out.write_text(json.dumps(found), encoding="utf-8")


def _numel(model: torch.nn.Module) -> Iterator[int]:
    for parameter in model.parameters():
        yield getattr(parameter, "ds_numel", parameter.numel())


if __name__ == "__main__":
    main()
