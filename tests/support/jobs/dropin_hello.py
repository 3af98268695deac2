"""A script as people write them for DeepSpeed: arguments, a config file, an engine, a loop, checkpoints.

It is run by the command `deepspeed`, which passes `--local_rank`. Rank 0 writes its losses to `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import log_dist, safe_get_full_grad
from deepspeed.utils.zero_to_fp32 import get_model_state_file, get_optim_files

MICRO_BATCH, RANKS, ACCUMULATION, STEPS = 2, 2, 2, 5
BATCH = MICRO_BATCH * RANKS * ACCUMULATION


def build() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))


def batches() -> torch.Tensor:
    return torch.randn(STEPS, BATCH, 7, generator=torch.Generator().manual_seed(5))


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs - 1.0).square().mean()


def reference() -> list[float]:
    """The losses of the same job in plain torch, on one process."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out", required=True)
    given = deepspeed.add_config_arguments(parser).parse_args()
    assert given.local_rank == int(os.environ["LOCAL_RANK"])
    deepspeed.init_distributed(dist_backend="gloo")
    assert torch.distributed.is_initialized()
    assert dist.get_world_size() == RANKS
    fill_on_rank_0()
    with deepspeed.zero.Init():
        model = build()
    optimizer = FusedAdam(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    engine, optimizer, _, schedule = deepspeed.initialize(
        args=given, model=model, optimizer=optimizer, lr_scheduler=schedule
    )
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert isinstance(optimizer, DeepSpeedOptimizer)
    log_dist(f"on {get_accelerator().current_device_name()}", ranks=[0])
    losses = train(engine, range(3))
    engine.save_checkpoint(given.out, client_state={"best": torch.tensor(losses[-1]), "epoch": 1})
    assert engine.load_checkpoint(given.out, tag="nothing") == (None, None)
    train(engine, range(3, 4))
    _, state = engine.load_checkpoint(given.out)
    assert state["best"].item() == torch.tensor(losses[-1]).item()
    folder = f"{given.out}/{Path(given.out, 'latest').read_text(encoding='utf-8').strip()}"
    assert torch.load(get_model_state_file(folder, 3)) == state
    assert "zero_stage" in torch.load(get_optim_files(folder)[0])["optimizer_state_dict"]
    losses += train(engine, range(3, STEPS))
    look(engine)
    if dist.get_rank() == 0:
        with open(f"{given.out}/losses.json", "w", encoding="utf-8") as file:
            json.dump(losses, file)


def fill_on_rank_0() -> None:
    """As `from_pretrained` loads a model that no engine has yet: all ranks see what rank 0 wrote."""
    with deepspeed.zero.Init():
        model = torch.nn.Linear(40, 40)
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0):
        if dist.get_rank() == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(2.0)
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert all(parameter.eq(2.0).all() for parameter in model.parameters())


def train(engine: deepspeed.DeepSpeedEngine, steps: range) -> list[float]:
    data, losses = batches(), []
    for step in steps:
        parts = data[step].split(MICRO_BATCH)
        total = 0.0
        for turn in range(ACCUMULATION):
            loss = loss_of(engine(parts[turn * RANKS + dist.get_rank()]))
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                assert all(safe_get_full_grad(one) is not None for one in engine.module.parameters())
            engine.step()
            total += loss.item()
        mean = torch.tensor(total / ACCUMULATION)
        dist.all_reduce(mean, log_name="loss")
        losses.append(mean.item() / RANKS)
    assert engine.was_step_applied()
    assert engine.optimizer.overflow is False
    return losses


def look(engine: deepspeed.DeepSpeedEngine) -> None:
    """What trainers ask of an engine."""
    stage = engine.zero_optimization_stage()
    assert engine.config.get("zero_optimization")["stage"] == stage
    assert engine.get_batch_info() == (BATCH, MICRO_BATCH, ACCUMULATION)
    assert engine.get_mom() == [(0.9, 0.999)]
    assert engine.get_global_grad_norm() > 0
    whole = engine._zero3_consolidated_16bit_state_dict()
    assert (whole is None) == (dist.get_rank() != 0)
    weight = engine.module[0].weight
    if stage == 3:
        assert weight.ds_numel == weight.partition_numel() * RANKS - 1 == 231
        assert weight.ds_status in list(ZeroParamStatus)  # whole already where the ranks of a host share memory
    with deepspeed.zero.GatheredParameters([weight]):
        if stage == 3:
            assert weight.ds_status == ZeroParamStatus.AVAILABLE
        weight.data.fill_(0.5)  # by every rank, without a modifier rank
    with deepspeed.zero.GatheredParameters([weight]):
        assert weight.eq(0.5).all()
    engine.set_train_batch_size(MICRO_BATCH * RANKS)
    assert engine.gradient_accumulation_steps() == 1


if __name__ == "__main__":
    main()
