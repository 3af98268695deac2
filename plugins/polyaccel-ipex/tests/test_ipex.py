"""The plugin keeps polyaccel's contract, and what it trains is what the plain host trains. `make test-ipex`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from polyaccel_ipex import optimize
from polyaccel_ipex.accelerator import IpexAccelerator

import polyaccel
from polyaccel.accelerators import choose_accelerator, set_accelerator
from polyaccel.accelerators.base import Accelerator
from polyaccel.errors import ShardingError
from polyaccel.ops.base import UPDATE, KernelTable
from polyaccel.testkit.accelerator import AcceleratorContract


class TestIpex(AcceleratorContract):
    def make(self) -> Accelerator:
        return IpexAccelerator()


def test_it_is_chosen_where_it_is_installed_and_computes() -> None:
    chosen = choose_accelerator()
    assert chosen.name == "ipex"
    assert chosen.device_name() == "cpu"
    table: KernelTable = chosen.kernels()
    assert table.provider(UPDATE).startswith("ipex 2.8")


def train(name: str, stage: int, *, bf16: bool = False) -> list[float]:
    """Losses of five steps of a small model on the accelerator called `name`."""
    set_accelerator(choose_accelerator(name))
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.GELU(), torch.nn.Linear(40, 3))
    if name == "ipex":
        model = optimize(model.train())
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    engine, *_ = polyaccel.initialize(model=model, config=config)
    draws = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(5):
        x, y = torch.randn(8, 24, generator=draws), torch.randint(0, 3, (8,), generator=draws)
        loss = torch.nn.functional.cross_entropy(engine(x.bfloat16() if bf16 else x).float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_trains_as_the_plain_host(stage: int) -> None:
    losses = train("ipex", stage)
    assert losses == pytest.approx(train("cpu", stage), rel=1e-5)
    assert losses[-1] != losses[0]
    assert train("ipex", stage, bf16=True) == pytest.approx(losses, rel=2e-2)


@pytest.mark.parametrize("option", ["optimizer", "weights_prepack"])
def test_what_would_take_the_weights_from_the_engine_is_refused(option: str) -> None:
    with pytest.raises(ShardingError) as caught:
        optimize(torch.nn.Linear(2, 2), **{option: True})
    assert option in str(caught.value)
