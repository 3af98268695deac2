"""Starts of a job with replicas, ranks being threads: load what there is, and train on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from parity_models import VOCAB, assert_bitwise, grouped, make_config, on_threads, parity_model, snapshot
from torch import nn

import polyaccel
from polyaccel.checkpoint.in_memory import replicas
from polyaccel.comm.base import Communicator

SAMPLES = 96


def dataset() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.TensorDataset(*(torch.randint(0, VOCAB, (SAMPLES,), generator=generator) for _ in range(2)))


def engine_of(model: nn.Module, stage: int, world: int, **changes: Any) -> Any:
    """Twelve samples a step at every world size."""
    changes.setdefault("checkpoint", {"in_memory": True})
    config = make_config(stage, gradient_clipping=1.0, **changes)
    config |= {
        "train_micro_batch_size_per_gpu": 12 // world,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.05}},
    }
    engine, *_ = polyaccel.initialize(
        model=model, model_parameters=grouped(model), training_data=dataset(), config=config
    )
    return engine


def losses_of(engine: Any, steps: int) -> list[float]:
    """The losses over all ranks of so many steps."""
    ranks = [engine.communicator.all_gather_object(engine.train_batch().item()) for _ in range(steps)]
    return [sum(losses) / len(losses) for losses in ranks]


def start(
    world: int,
    stage: int,
    folder: Path,
    steps: int,
    *,
    act: Callable[[Any], Any] = lambda engine: None,
    is_restart: bool = True,
    **changes: Any,
) -> tuple[int, list[float], dict[str, Any]]:
    """A start of the job: load, if there is anything, and train. The step where it began, its losses and parameters."""
    replicas._engines = count()

    def train(communicator: Communicator, model: nn.Module) -> tuple[int, list[float], dict[str, Any]]:
        engine = engine_of(model, stage, world, **changes)
        if is_restart:
            engine.load_checkpoint(str(folder))
            assert not engine.has_replica()
        began = engine.global_steps
        act(engine)
        losses = losses_of(engine, steps)
        engine._settle_replica()
        found = began, losses, snapshot(engine.module)
        engine.destroy()
        return found

    first: tuple[int, list[float], dict[str, Any]]
    first, *others = on_threads(world, train, parity_model)
    for other in others:
        assert_bitwise(other[2], first[2])
    return first
