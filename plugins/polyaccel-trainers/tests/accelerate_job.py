"""A training by Accelerate over polyaccel on two ranks: STAGE, ACCUMULATION, PRECISION, OUT. It saves and resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

STEPS, MICRO_BATCH, RANKS = 6, 2, 2


def build() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))


def samples(accumulation: int) -> torch.Tensor:
    count = STEPS * accumulation * MICRO_BATCH * RANKS
    return torch.randn(count, 7, generator=torch.Generator().manual_seed(5))


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - 1.0).square().mean()


def made(model: torch.nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def reference(accumulation: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of plain torch, in one process."""
    model = build()
    optimizer, schedule = made(model)
    losses = []
    for batch in samples(accumulation).split(accumulation * MICRO_BATCH * RANKS):
        loss = loss_of(model(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def train(accelerator: Any, prepared: tuple[Any, ...], batches: list[Any]) -> list[float]:
    """The loop of Accelerate's documentation."""
    model, optimizer, schedule = prepared
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
        parts.append(accelerator.gather(loss.detach()).mean().item())
        if accelerator.sync_gradients:
            losses.append(sum(parts) / len(parts))
            parts = []
    return losses


def main(stage: str, accumulation: str, precision: str, out: str) -> None:
    from accelerate import InitProcessGroupKwargs
    from polyaccel_trainers.accelerate import Accelerator, PolyaccelPlugin

    count, folder = int(accumulation), Path(out)
    zero = {"stage": int(stage), **({"stage3_param_persistence_threshold": 0} if stage == "3" else {})}

    def start() -> tuple[Any, tuple[Any, ...], list[Any]]:
        accelerator = Accelerator(
            polyaccel_plugin=PolyaccelPlugin(config={"zero_optimization": zero}),
            gradient_accumulation_steps=count,
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
            step_scheduler_with_optimizer=False,
            mixed_precision=precision,
            cpu=True,
        )
        assert accelerator.num_processes == RANKS
        model = build()
        optimizer, schedule = made(model)
        loader = DataLoader(TensorDataset(samples(count)), batch_size=MICRO_BATCH)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        return accelerator, (model, optimizer, schedule), [batch for (batch,) in loader]

    accelerator, prepared, batches = start()
    first = train(accelerator, prepared, batches[: 3 * count])
    accelerator.save_state(str(folder / "state"))
    losses = first + train(accelerator, prepared, batches[3 * count :])
    accelerator.free_memory()
    accelerator, prepared, batches = start()
    accelerator.load_state(str(folder / "state"))
    again = train(accelerator, prepared, batches[3 * count :])
    weights = accelerator.get_state_dict(prepared[0])
    assert type(accelerator.unwrap_model(prepared[0])) is torch.nn.Sequential
    accelerator.save_model(prepared[0], str(folder / "model"))
    if accelerator.is_main_process:
        torch.save(weights, folder / "weights.pt")
        (folder / "result.json").write_text(json.dumps({"losses": losses, "again": again}))
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
