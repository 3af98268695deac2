"""Accumulation that the script counts, and layers that a config names, against plain torch."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

from polyaccel import PolyaccelError
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.threads import run_threads

WINDOWS = (3, 1, 2)
"""Backward passes before each step: no multiple of the config's accumulation."""


def batch_of(rank: int, number: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + number))


def plain(model: nn.Module, ranks: int, divisor: int) -> dict[str, Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    number = 0
    for window in WINDOWS:
        optimizer.zero_grad()
        for _ in range(window):
            for rank in range(ranks):
                (model(batch_of(rank, number)).square().mean() / (ranks * divisor)).backward()
            number += 1
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("steps", [1, 2])
def test_a_script_that_counts_steps_when_it_wants(stage: int, steps: int) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    copies = [copy.deepcopy(model) for _ in range(2)]
    wanted = plain(copy.deepcopy(model), 2, steps)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": steps,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }

    def body(communicator: Communicator) -> dict[str, Any] | None:
        engine, *_ = deepspeed.initialize(model=copies[communicator.rank], config=config)
        assert engine.managed_gradient_accumulation() is False
        number = 0
        for window in WINDOWS:
            for _ in range(window):
                engine.backward(engine(batch_of(communicator.rank, number)).square().mean())
                number += 1
                assert engine.is_gradient_accumulation_boundary() is False
            engine.step()
        assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (3, 8 * sum(WINDOWS), 0)
        for refused in (lambda: engine.set_gradient_accumulation_boundary(True), engine.coalesce_grad_reduction):
            with pytest.raises(PolyaccelError):
                refused().__enter__()
        found = engine._zero3_consolidated_16bit_state_dict()
        engine.destroy()
        return found

    found, _ = run_threads(2, body)
    assert found is not None
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


class Block(nn.Module):
    """Layers that no structure shows: features in two halves, each of which a norm sees alone."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.scale, self.leave = nn.Linear(4, 8), nn.LayerNorm(4), nn.Linear(8, 6)
        self.whole = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        halves = self.enter(inputs).unflatten(-1, (-1, 4))
        return self.whole(self.leave(self.scale(halves).flatten(-2)))


SPECS = [
    {"patterns": [r"enter\.weight"]},
    {"patterns": [r"scale\.weight"], "partition_type": "skip", "grad_allreduce": True},
    {"patterns": [r"leave\.weight"], "partition_type": "row"},
    {"patterns": [r"whole\.weight"], "gather_output": True},
]


def test_gathered_outputs_and_summed_gradients_are_those_of_one_rank() -> None:
    model = Block()
    copies = [copy.deepcopy(model) for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.cat([batch_of(0, step), torch.ones(4, 1)], 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": SPECS, "use_default_specs": False}},
    }

    def body(communicator: Communicator) -> list[float]:
        engine, *_ = deepspeed.initialize(model=copies[communicator.rank], config=config)
        assert engine.module.whole.weight.shape == (3, 6)
        found = []
        for step in range(4):
            loss = engine(torch.cat([batch_of(0, step), torch.ones(4, 1)], 1)).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        engine.destroy()
        return found

    for found in run_threads(2, body):
        assert found == pytest.approx(losses, rel=1e-5)
