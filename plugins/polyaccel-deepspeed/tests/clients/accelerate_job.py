"""A training script of Accelerate's, for `accelerate launch` with a DeepSpeed plugin: nothing in it refers to
polyaccel.

`--stage`, `--accumulation`, `--out`; rank 0 writes the losses and the final weights' sums to OUT/result.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from torch.utils.data import DataLoader, TensorDataset

STEPS, MICRO_BATCH, RANKS = 6, 2, 2


def build() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))


def samples(accumulation: int) -> torch.Tensor:
    count = STEPS * accumulation * MICRO_BATCH * RANKS
    return torch.randn(count, 7, generator=torch.Generator().manual_seed(5))


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs - 1.0).square().mean()


def reference(accumulation: int) -> list[float]:
    """The losses of plain torch, on one process."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    losses = []
    for batch in samples(accumulation).split(accumulation * MICRO_BATCH * RANKS):
        loss = loss_of(model(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--offload", default="none")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    plugin = DeepSpeedPlugin(
        zero_stage=given.stage,
        gradient_accumulation_steps=given.accumulation,
        gradient_clipping=0.5,
        offload_optimizer_device=given.offload,
        zero3_save_16bit_model=True,
    )
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=given.accumulation,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        step_scheduler_with_optimizer=False,
    )
    assert accelerator.num_processes == RANKS, accelerator.state
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    loader = DataLoader(TensorDataset(samples(given.accumulation)), batch_size=MICRO_BATCH)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    batches = [batch for (batch,) in loader]
    losses = train(accelerator, model, optimizer, schedule, batches[: 3 * given.accumulation], given.accumulation)
    accelerator.save_state(str(given.out / "state"))
    train(accelerator, model, optimizer, schedule, batches[: given.accumulation], given.accumulation)
    accelerator.load_state(str(given.out / "state"))
    losses += train(accelerator, model, optimizer, schedule, batches[3 * given.accumulation :], given.accumulation)
    whole = accelerator.get_state_dict(model)
    unwrapped = accelerator.unwrap_model(model)
    assert type(unwrapped) is torch.nn.Sequential
    if accelerator.is_main_process:
        shapes = {name: list(value.shape) for name, value in whole.items()}
        result = {"losses": losses, "shapes": shapes}
        (given.out / "result.json").write_text(json.dumps(result), encoding="utf-8")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def train(
    accelerator: Accelerator, model: Any, optimizer: Any, schedule: Any, batches: list[Any], accumulation: int
) -> list[float]:
    losses, parts = [], []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = loss_of(model(batch))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        parts.append(accelerator.reduce(loss.detach(), reduction="mean").item())
        if len(parts) == accumulation:
            losses.append(sum(parts) / accumulation)
            parts = []
    return losses


if __name__ == "__main__":
    main()
