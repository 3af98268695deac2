"""Training as users do it: a torch module, `polyaccel.initialize`, ten steps at every stage on a device of torch's, in
32 and in 16 bits, with states and parameters on the device and in host memory.

What is compared against is torch's own AdamW on the host, on the whole batch. No parameter is small enough to stay
whole at stage 3: every one is freed and gathered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import polyaccel
from polyaccel.accelerators.detect import set_accelerator
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType
from polyaccel.testkit.comparison import same_numbers
from polyaccel.testkit.progress import doing

_STEPS = 10
_BATCH = 4
_ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
_LOSS_RTOL = 1e-4  # a device adds in another order than the host
_NARROW_RTOL = 0.1  # 16 bits of weights and activations, over ten steps
_ON_HOST: dict[str, Any] = {"device": "cpu"}
_OFFLOADS = ("offload_optimizer", "offload_param")


def check_torch_stages(communicator: Communicator) -> None:
    """Train at stages 0 to 3: losses of all ranks within rounding of plain torch's, and bitwise equal where reductions
    are deterministic. Collective; AssertionError on every rank that sees otherwise."""
    set_accelerator(communicator.accelerator)
    expected = _train_plainly(communicator.world_size)
    dtypes = communicator.accelerator.supported_dtypes()
    for name, rtol in (("fp32", _LOSS_RTOL), *([("bf16", _NARROW_RTOL)] if DType.BFLOAT16 in dtypes else [])):
        precision = {} if name == "fp32" else {"bf16": {"enabled": True}}
        runs = {stage: _train(communicator, stage, precision, {}) for stage in range(4)}
        for stage, losses in runs.items():
            same_numbers(losses, expected, f"losses by step, {name}, stage {stage}", rtol=rtol)
            if communicator.deterministic:
                same_numbers(losses, runs[0], f"losses by step, {name}, stage {stage} against stage 0, bit for bit")
    for stage, offload in ((1, {"offload_optimizer": _ON_HOST}), (3, dict.fromkeys(_OFFLOADS, _ON_HOST))):
        losses = _train(communicator, stage, {}, offload)
        same_numbers(losses, expected, f"losses by step, stage {stage}, {' and '.join(offload)}", rtol=_LOSS_RTOL)


def _train(
    communicator: Communicator, stage: int, precision: dict[str, Any], offload: dict[str, dict[str, Any]]
) -> list[float]:
    """The mean over ranks of every step's loss."""
    doing(f"training at stage {stage} with {precision or 'fp32'} {' and '.join(offload)}")
    config = {
        "train_micro_batch_size_per_gpu": _BATCH,
        "optimizer": {"type": "AdamW", "params": _ADAMW},
        **precision,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 200,
            "stage3_param_persistence_threshold": 0,
            **offload,
        },
    }
    engine, *_ = polyaccel.initialize(model=_model(), config=config)
    dtype = torch.bfloat16 if precision else torch.float32
    losses = []
    for step in range(_STEPS):
        inputs, targets = (part.to(engine.device) for part in _batch(step, communicator.rank))
        loss = nn.functional.mse_loss(engine(inputs.to(dtype)), targets.to(dtype))
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
