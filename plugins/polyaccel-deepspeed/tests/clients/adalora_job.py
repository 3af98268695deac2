"""PEFT's AdaLoRA in transformers' Trainer, allocated by a callback: `adalora_job.py OUT --base DIR [--config FILE]`.

AdaLoRA looks at gradients, which a Trainer under DeepSpeed has no callback for: Accelerate's `backward` takes the step,
which forgets them. So the callback stands before the engine's step. Without `--config` it is a job of plain torch, on
one process, whose micro-batch is that of two ranks. Rank 0 writes what came out to OUT/result.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from peft import get_peft_model
from peft_job import MICRO_BATCH, RANKS, STEPS, adapters, gathered
from torch.utils.data import Dataset
from trainer_job import Tokens
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed


class Sentences(Dataset):
    """`Tokens` for a vocabulary of 62."""

    def __init__(self, count: int) -> None:
        self._tokens = Tokens(count)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: value % 62 for name, value in self._tokens[index].items()}


class Allocates(TrainerCallback):
    """Calls `update_and_allocate` when a step's gradients are there and the step is not taken."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._stage < 0:
            return
        engine = self.trainer.model_wrapped
        step = engine.step

        def allocate_and_step(*given: Any, **named: Any) -> Any:
            with gathered(self.trainer.model, self._stage):
                self.trainer.model.base_model.update_and_allocate(state.global_step)
            return step(*given, **named)

        engine.step = allocate_and_step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._stage < 0:
            self.trainer.model.base_model.update_and_allocate(state.global_step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", required=True)
    parser.add_argument("--config", type=Path)
    given = parser.parse_args()
    config = given.config and json.loads(given.config.read_text(encoding="utf-8"))
    arguments = TrainingArguments(
        output_dir=str(given.out / "run"),
        deepspeed=config,
        ddp_backend="gloo" if config else None,
        use_cpu=True,
        per_device_train_batch_size=MICRO_BATCH * (1 if config else RANKS),
        max_steps=STEPS,
        learning_rate=0.01,
        adam_epsilon=1e-4,
        max_grad_norm=0.0,
        average_tokens_across_devices=False,  # which would count AdaLoRA's own part of the loss twice
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
    )
    model = AutoModelForCausalLM.from_pretrained(given.base)
    set_seed(5)
    model = get_peft_model(model, adapters("adalora"))
    callback = Allocates(config["zero_optimization"]["stage"] if config else -1)
    data = Sentences(STEPS * MICRO_BATCH * RANKS)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])
    callback.trainer = trainer
    trainer.train()
    trainer.save_model(str(given.out / "saved"))
    if trainer.is_world_process_zero():
        pattern = trainer.model.peft_config["default"].rank_pattern
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found = {"losses": losses, "ranks": {name: sum(kept) for name, kept in pattern.items()}}
        (given.out / "result.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
