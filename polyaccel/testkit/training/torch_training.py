"""Training as users do it: a torch module, `polyaccel.initialize`, ten steps at every stage on a device of torch's.

What is compared against is torch's own AdamW on the host, on the whole batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import polyaccel
from polyaccel.accelerators.detect import set_accelerator
from polyaccel.comm.base import Communicator

_STEPS = 10
_BATCH = 4
_ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
_LOSS_RTOL = 1e-4  # a device adds in another order than the host


def check_torch_stages(communicator: Communicator) -> None:
    """Train at stages 0 to 3: losses of all ranks within rounding of plain torch's, and bitwise alike where
    reductions are deterministic. Collective; AssertionError on every rank that sees otherwise."""
    set_accelerator(communicator.accelerator)
    expected = _train_plainly(communicator.world_size)
    runs = {stage: _train(communicator, stage) for stage in range(4)}
    for stage, losses in runs.items():
        np.testing.assert_allclose(losses, expected, rtol=_LOSS_RTOL, err_msg=f"losses at stage {stage}")
        if communicator.deterministic:
            what = f"losses at stage {stage} are not the bits of stage 0"
            np.testing.assert_array_equal(losses, runs[0], err_msg=what)


def _train(communicator: Communicator, stage: int) -> list[float]:
    """The mean over ranks of every step's loss."""
    config = {
        "train_micro_batch_size_per_gpu": _BATCH,
        "optimizer": {"type": "AdamW", "params": _ADAMW},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200},
    }
    engine, *_ = polyaccel.initialize(model=_model(), config=config)
    losses = []
    for step in range(_STEPS):
        inputs, targets = (part.to(engine.device) for part in _batch(step, communicator.rank))
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(float(np.mean(communicator.all_gather_object(loss.item()))))
    engine.destroy()
    return losses


def _train_plainly(world_size: int) -> list[float]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW)
    losses = []
    for step in range(_STEPS):
        parts = [_batch(step, rank) for rank in range(world_size)]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _model() -> nn.Module:
    """The same on every rank and in every call, on the host: odd sizes, a normalisation, a layer used twice."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twice = nn.Linear(23, 23)
        return nn.Sequential(nn.Linear(7, 23), nn.Tanh(), twice, nn.LayerNorm(23), twice, nn.Tanh(), nn.Linear(23, 3))


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return _draw(generator, 7), _draw(generator, 3)


def _draw(generator: Any, width: int) -> Tensor:
    return torch.randn(_BATCH, width, generator=generator)
