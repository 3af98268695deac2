"""Keys that DeepSpeed has dropped, trained on two ranks beside plain torch: `amp`, `nebula` and `datastates_ckpt`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import assert_close, drawn_from, snapshot
from torch import nn

from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.procs import RankPool

PLUGIN = Path(__file__).parents[3] / "plugins" / "polyaccel-deepspeed"
STEPS, RATE = 4, 0.1
Pools = Callable[..., RankPool]


def model() -> nn.Module:
    with drawn_from(5):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train_here(communicator: Communicator, section: dict[str, Any], folder: str) -> dict[str, torch.Tensor]:
    """Train, save after half of the steps, and go on from there in another engine."""
    sys.path.insert(0, str(PLUGIN))
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": 1},
        **section,
    }
    trained = model()
    for half in range(2):
        engine, *_ = deepspeed.initialize(model=trained, config=config)
        if half:
            assert engine.load_checkpoint(folder)[0] is not None
        for step in range(half * STEPS // 2, (half + 1) * STEPS // 2):
            inputs = batch(step, communicator.rank).to(next(engine.module.parameters()).dtype)
            engine.backward(engine(inputs).float().square().mean())
            engine.step()
        if not half:
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
        engine.destroy()
        found, trained = snapshot(trained), model()
    return {name: value.float() for name, value in found.items()}


def train_plainly(autocast: Callable[[], AbstractContextManager[Any]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    masters = model()
    for step in range(STEPS):
        trained = model().to(dtype)
        trained.load_state_dict(masters.state_dict())
        gradients: Sequence[torch.Tensor] = [torch.zeros_like(one) for one in masters.parameters()]
        for rank in range(2):
            with autocast():
                loss = trained(batch(step, rank).to(dtype)).float().square().mean()
            found = torch.autograd.grad(loss * 1024, list(trained.parameters()))
            gradients = [total + one.float() / 2048 for total, one in zip(gradients, found, strict=True)]
        with torch.no_grad():
            for one, gradient in zip(masters.parameters(), gradients, strict=True):
                one -= RATE * gradient
    return {name: value.to(dtype).float() for name, value in snapshot(masters).items()}


def half() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.float16)


CASES: dict[str, tuple[dict[str, Any], Any, torch.dtype, float]] = {
    "amp O1": ({"amp": {"enabled": True, "loss_scale": 1024}}, half, torch.float32, 1e-4),
    "amp O2": ({"amp": {"enabled": True, "opt_level": "O2", "loss_scale": 1024}}, nullcontext, torch.float16, 1e-3),
    "nebula": ({"nebula": {"enabled": True, "num_of_version_in_retention": 1}}, nullcontext, torch.float32, 1e-6),
    "datastates": ({"datastates_ckpt": {"host_cache_size": 1}}, nullcontext, torch.float32, 1e-6),
}


@pytest.mark.parametrize("case", CASES)
def test_an_older_key_trains_as_plain_torch(rank_pool: Pools, case: str, tmp_path: Path) -> None:
    section, autocast, dtype, tolerance = CASES[case]
    wanted = train_plainly(autocast, dtype)
    for found in rank_pool(2).run(train_here, section, str(tmp_path)):
        assert_close(found, wanted, tolerance)
