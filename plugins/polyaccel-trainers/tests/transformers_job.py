"""A training by transformers' Trainer over polyaccel: STAGE, ACCUMULATION, OUT. "plain" is theirs, in one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DistributedConfig, TrainingArguments

STEPS, BATCH, LENGTH = 4, 8, 12


def data(count: int) -> list[dict[str, Any]]:
    drawn = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 64, (count, LENGTH), generator=drawn)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def model() -> Any:
    torch.manual_seed(3)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def main(stage: str, accumulation: str, out: str) -> None:
    count = int(accumulation)
    ranks = 1 if stage == "plain" else 2

    def trainer() -> Any:
        arguments = TrainingArguments(
            out,
            per_device_train_batch_size=BATCH // ranks // count,
            gradient_accumulation_steps=count,
            max_steps=STEPS,
            learning_rate=1e-2,
            max_grad_norm=0.5,
            logging_steps=1,
            save_steps=2,
            use_cpu=True,
            ddp_backend="gloo" if ranks > 1 else None,
            disable_tqdm=True,
            report_to=[],
            seed=7,
        )
        named: dict[str, Any] = {"args": arguments, "train_dataset": data(STEPS * BATCH)}
        if stage == "plain":
            return transformers.Trainer(model(), **named)
        from polyaccel_trainers.accelerate import PolyaccelPlugin
        from polyaccel_trainers.transformers import Trainer, plugin_of

        plugin = plugin_of(DistributedConfig(fsdp_size=2)) if stage == "3" else PolyaccelPlugin(stage=int(stage))
        return Trainer(model(), **named, polyaccel_plugin=plugin)

    def losses(one: Any) -> list[float]:
        return [entry["loss"] for entry in one.state.log_history if "loss" in entry]

    first = trainer()
    first.train()
    found = {
        "losses": losses(first),
        "norms": [one["grad_norm"] for one in first.state.log_history if "grad_norm" in one],
    }
    first.save_model(str(Path(out, "model")))
    again = trainer()
    again.train(resume_from_checkpoint=str(Path(out, "checkpoint-2")))
    found["again"] = losses(again)
    if first.is_world_process_zero():
        Path(out, "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
