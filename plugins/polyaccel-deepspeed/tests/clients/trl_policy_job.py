"""TRL's DPO, or GRPO with generation, on a model from a folder, with PEFT's LoRA or without: it does not refer to
polyaccel.

`trl_policy_job.py METHOD STAGE OUT --base DIR [--lora] [--sharded] [--learns N]`; stage -1 is the same job without
DeepSpeed, on one process, whose micro-batch is that of two ranks. Rank 0 writes what was logged to OUT/result.json.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl_job import WORDS, texts, tokenizer, training_arguments

KEYS = ("loss", "grad_norm", "reward", "kl", "rewards/margins", "rewards/accuracies", "completions/mean_length")


def save_model(folder: Path) -> None:
    """What every job starts from, its tokenizer next to it."""
    set_seed(3)
    shape = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, vocab_size=len(WORDS) + 2, max_position_embeddings=64,
                        bos_token_id=1, eos_token_id=1, pad_token_id=0, initializer_range=0.2)  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def draw_by_row(model: Any) -> None:
    """Let `model` draw a text from its own seed, so that it is the same in whatever batch and rank it is drawn."""
    generate = model.generate

    def by_row(input_ids: torch.Tensor, attention_mask: torch.Tensor, **named: Any) -> torch.Tensor:
        seen: Counter[int] = Counter()
        rows = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            start = ids[mask.bool()]
            number = int((start * torch.arange(1, len(start) + 1)).sum())
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1000 * seen[number] + number)
                text = generate(start[None], attention_mask=torch.ones_like(start)[None], **named)[0]
            seen[number] += 1
            rows.append(torch.cat([ids[~mask.bool()], text]))
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)

    model.generate = by_row


def reward(completions: list[str], **named: Any) -> list[float]:
    """More for words of small numbers."""
    numbers = [[int(word[1:]) for word in text.split() if word.startswith("w")] for text in completions]
    return [sum(1.0 - one / 60 for one in each) / (len(each) + 1) for each in numbers]


def trainer_of(given: argparse.Namespace, arguments: dict[str, Any]) -> Any:
    lora = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]) if given.lora else None
    starts = [" ".join(text.split()[: 3 + index % 3]) for index, text in enumerate(texts(1))]
    if given.method == "dpo":
        data = Dataset.from_dict({"prompt": starts, "chosen": texts(2), "rejected": texts(3)})
        config = DPOConfig(max_length=32, **arguments)
        return DPOTrainer(given.base, args=config, train_dataset=data, processing_class=tokenizer(), peft_config=lora)
    if given.learns:
        arguments |= {"max_steps": given.learns, "per_device_train_batch_size": 16, "learning_rate": 1e-2}
    drawing: dict[str, Any] = {"max_completion_length": 8, "num_generations": 8 if given.learns else 2}
    drawing["ds3_gather_for_generation"] = not given.sharded
    config = GRPOConfig(beta=0.04, temperature=1.0, **drawing, **arguments)
    job = GRPOTrainer(given.base, reward_funcs=reward, args=config, train_dataset=Dataset.from_dict({"prompt": starts}),
                      processing_class=tokenizer(), peft_config=lora)  # fmt: skip
    if not given.learns:
        draw_by_row(job.model)
    return job


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=["dpo", "grpo"])
    parser.add_argument("stage", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", required=True)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--sharded", action="store_true", help="gather layer by layer while texts are drawn")
    parser.add_argument("--learns", type=int, default=0, metavar="N", help="GRPO in N larger steps, drawn as TRL draws")
    given = parser.parse_args()
    job = trainer_of(given, training_arguments(given.stage, given.out))
    job.train()
    job.save_model(str(given.out / "saved"))
    if job.is_world_process_zero():
        logged = [entry for entry in job.state.log_history if "loss" in entry]
        found = {key: [entry[key] for entry in logged] for key in KEYS if key in logged[0]}
        if not given.lora:
            loaded = AutoModelForCausalLM.from_pretrained(given.out / "saved")
            found["norms"] = [float(weight.norm()) for weight in loaded.parameters()]
        (given.out / "result.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
