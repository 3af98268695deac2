"""Layers dealt to stages by the time of a trial step: that of rank 0, on every rank."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from pipeline_models import batches, pipeline_config
from torch import Tensor, nn

import polyaccel
from polyaccel.pipeline.table import PipelineError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.pipeline import LayerSpec, PipelineModule, TiedLayerSpec, measured, measured_blocks
from polyaccel.torch.pipeline.stage_module import cut_of


class _Clock(threading.local):
    now = 0.0


Clock = _Clock()
"""Stands for the time, that of a thread, which is a rank: a layer that is called lets its cost pass."""


class Costly(nn.Module):
    def __init__(self, cost: float) -> None:
        super().__init__()
        self.cost = cost
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, hidden: Tensor) -> Tensor:
        Clock.now += self.cost
        return hidden * self.weight


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (measured, measured_blocks):
        monkeypatch.setattr(module, "perf_counter", lambda: Clock.now)


COSTS = (1.0, 1.0, 1.0, 9.0, 1.0, 1.0)


def parts_of(layers, **changes):
    def run(communicator):
        generator = torch.random.get_rng_state()
        arguments = {"partition_method": "profiled", "trial_inputs": torch.ones(4, 6), **changes}
        model = PipelineModule(layers, 2, loss_fn=nn.functional.mse_loss, **arguments)
        if communicator.rank == 0:
            assert torch.equal(torch.random.get_rng_state(), generator)
        return [list(part) for part in model.parts]

    first, second = run_threads(2, run)
    assert first == second
    return first


def test_layers_are_dealt_by_what_they_cost():
    layers = [LayerSpec(Costly, cost) for cost in COSTS]
    assert parts_of(layers) == [[0, 1, 2], [3, 4, 5]]
    assert parts_of(layers, partition_method="uniform") == [[0, 1, 2], [3, 4, 5]]
    assert parts_of([*layers, LayerSpec(Costly, 30.0)]) == [[0, 1, 2, 3, 4, 5], [6]]
    assert parts_of(layers, schedule="zb-v") == [[0, 1], [2], [3], [4, 5]]


def test_tied_layers_functions_and_modules_are_tried_too():
    tied = partial(TiedLayerSpec, "a", Costly, 5.0)
    module = Costly(1.0)
    before = module.weight.detach().clone()
    layers = [tied(), module, torch.tanh, tied(forward_fn=lambda one, hidden: one(hidden) + 1)]
    assert parts_of(layers) == [[0, 1, 2], [3]]
    assert torch.equal(module.weight, before)
    assert module.weight.grad is None


def test_what_cannot_be_measured_is_said_on_every_rank():
    layers = [LayerSpec(Costly, 1.0), LayerSpec(nn.Linear, 5, 5)]
    with pytest.raises(PipelineError) as caught:
        parts_of(layers)
    assert all(part in str(caught.value) for part in ("RuntimeError", "mat1", "mat2", "layer 1"))
    with pytest.raises(PipelineError) as caught:
        parts_of(layers, trial_inputs=None)
    assert caught.value.value == "profiled"
    assert all(part in str(caught.value) for part in ("partition_method", "'measured'"))
    assert len(PipelineModule(layers, partition_method="profiled").parts) == 1  # nothing to deal


def test_a_sequential_says_what_it_is_tried_with():
    config = pipeline_config(1, pipeline={"stages": 2, "partition": "profiled"})

    def run(communicator):
        model = nn.Sequential(Costly(5.0), Costly(1.0), Costly(1.0), Costly(1.0), nn.Linear(6, 5))
        model.loss_fn, model.trial_inputs = nn.functional.mse_loss, torch.ones(4, 6)
        engine, *_ = polyaccel.initialize(model=model, config=config)
        loss = float(engine.train_batch(batches(0, 0)))
        parts = [list(part) for part in engine.module.parts]
        engine.destroy()
        return loss > 0, parts

    assert run_threads(2, run) == [(True, [[0], [1, 2, 3, 4]])] * 2


class Blocks(nn.Module):
    """A model that nobody wrote for a pipeline; what comes before its blocks, and after them, has a cost too."""

    def __init__(self, before: float, costs: tuple[float, ...], after: float) -> None:
        super().__init__()
        self.before, self.after = Costly(before), Costly(after)
        self.blocks = nn.ModuleList(map(Costly, costs))
        self.blocks[1].weight.requires_grad_(False)
        self.register_buffer("shift", torch.zeros(()))
        self.dummy_inputs, self.loss_fn = torch.ones(2, 6), nn.functional.mse_loss

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.before(hidden) + self.shift
        for block in self.blocks:
            hidden = block(hidden) + 0 * self.before.weight  # every block stands behind what comes first
        return self.after(hidden)


TRIAL = torch.ones(3, 6)


def cut_by_time(*costs, inputs=TRIAL):
    config = pipeline_config(1, pipeline={"stages": 2, "partition": "profiled"})

    def run(communicator):
        model = Blocks(*costs)
        if inputs is not None:
            model.trial_inputs = inputs
        values = {name: one.detach().clone() for name, one in model.state_dict().items()}
        engine, *_ = polyaccel.initialize(model=model, config=config)
        cut = cut_of(model)
        assert cut is not None
        for name, one in model.named_parameters():
            assert torch.equal(one, values[name]), name
            assert one.grad is None
        loss = float(engine.train_batch(iter([(torch.ones(2, 6), torch.zeros(2, 6))] * 4)))
        engine.destroy()
        return loss > 0, [list(part) for part in cut.parts]

    return run_threads(2, run)


@pytest.mark.parametrize(
    ("costs", "parts"),
    [
        ((0.0, (1.0, 1.0, 1.0, 9.0, 1.0), 0.0), [[0, 1, 2], [3, 4]]),
        ((9.0, (1.0, 1.0, 1.0, 1.0, 1.0), 0.0), [[0], [1, 2, 3, 4]]),
        ((0.0, (1.0, 1.0, 1.0, 1.0, 1.0), 9.0), [[0, 1, 2, 3], [4]]),
    ],
    ids=["a-block", "before", "after"],
)
def test_blocks_of_a_model_are_dealt_by_what_they_cost(costs, parts):
    assert cut_by_time(*costs) == [(True, parts)] * 2


def test_a_model_says_what_it_is_tried_with():
    with pytest.raises(PipelineError) as caught:
        cut_by_time(0.0, (1.0, 1.0), 0.0, inputs=None)
    assert caught.value.value == "profiled"
    assert "trial_inputs" in str(caught.value)
    with pytest.raises(PipelineError) as caught:
        cut_by_time(0.0, (1.0, 1.0), 0.0, inputs=torch.ones(2, 5))
    assert caught.value.value == 0
    assert all(part in str(caught.value) for part in ("RuntimeError", "rank 0"))
