"""PEFT's LoRA or AdaLoRA in a loop of Accelerate's; saved, merged, and loaded again: it does not refer to polyaccel.

`peft_job.py KIND STAGE OUT --base DIR`; KIND is `lora` or `adalora`, and stage -1 is the same job without DeepSpeed, on
one process, whose micro-batch is that of two ranks. Rank 0 writes what came out to OUT/result.json.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from peft import AdaLoraConfig, AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from trainer_job import Tokens
from transformers import AutoModelForCausalLM, set_seed

STEPS, MICRO_BATCH, RANKS = 10, 2, 2


def adapters(kind: str) -> LoraConfig:
    """Of AdaLoRA ranks are cut between the second step and the eighth."""
    targets = ["q_proj", "v_proj"]
    if kind == "lora":
        return LoraConfig(r=4, lora_dropout=0.0, target_modules=targets, modules_to_save=["lm_head"])
    return AdaLoraConfig(init_r=6, target_r=3, tinit=2, tfinal=2, deltaT=1, total_step=STEPS, lora_dropout=0.0,
                         target_modules=targets)  # fmt: skip


def logits_of(model: Any) -> list[float]:
    tokens = torch.stack([Tokens(4)[index]["input_ids"] % 62 for index in range(4)])
    with torch.no_grad():
        found: list[float] = model(input_ids=tokens).logits.square().mean(dim=(0, 2)).tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["lora", "adalora"])
    parser.add_argument("stage", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", required=True)
    given = parser.parse_args()
    is_plain = given.stage < 0
    micro_batch = MICRO_BATCH * (RANKS if is_plain else 1)
    if is_plain:
        accelerator = Accelerator(cpu=True)
    else:
        plugin = DeepSpeedPlugin(zero_stage=given.stage, gradient_clipping=0.5, zero3_save_16bit_model=True)
        gloo = InitProcessGroupKwargs(backend="gloo")
        accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[gloo])
    model = AutoModelForCausalLM.from_pretrained(given.base)
    set_seed(5)
    model = get_peft_model(model, adapters(given.kind))
    optimizer = torch.optim.AdamW(
        (parameter for parameter in model.parameters() if parameter.requires_grad), lr=0.01, eps=1e-4
    )
    data = DataLoader(Tokens(STEPS * MICRO_BATCH * RANKS), batch_size=micro_batch)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    tuner = accelerator.unwrap_model(model)
    losses = []
    for number, batch in enumerate(data):
        outputs = model(input_ids=batch["input_ids"] % 62, labels=batch["labels"] % 62)
        (accelerator if is_plain else model).backward(outputs.loss)  # DeepSpeed's engine itself, whose step comes later
        if given.kind == "adalora":
            with gathered(tuner, given.stage):
                tuner.base_model.update_and_allocate(number)
        if is_plain:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        else:
            model.step()
        losses.append(float(accelerator.reduce(outputs.loss.detach(), reduction="mean")))
    model.eval()
    found: dict[str, Any] = {"losses": losses, "trained": logits_of(model)}
    tuner.save_pretrained(
        given.out / "saved", state_dict=accelerator.get_state_dict(model), is_main_process=accelerator.is_main_process
    )
    with gathered(tuner, given.stage):
        tuner.merge_adapter()
    found["merged"] = logits_of(model)
    with gathered(tuner, given.stage):
        tuner.unmerge_adapter()
    found["unmerged"] = logits_of(model)
    if accelerator.is_main_process:
        loaded = AutoPeftModelForCausalLM.from_pretrained(given.out / "saved")
        found["loaded"] = logits_of(loaded.merge_and_unload())
        (given.out / "result.json").write_text(json.dumps(found), encoding="utf-8")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def gathered(model: Any, stage: int) -> Any:
    """A context in which the weights are whole, and what is written to them stays."""
    if stage != 3:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0)


if __name__ == "__main__":
    main()
