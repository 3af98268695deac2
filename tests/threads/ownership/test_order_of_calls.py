"""The order in which a script calls the engine, and what it changes between steps: each row is a script that runs with
an engine on every rank and with plain torch on the whole batch, and trains the same.

`engine.step()` forgets the gradients that it used, so plain torch's side calls `zero_grad` after each step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairwise import combinations
from parity_models import (
    assert_close,
    batch,
    grouped,
    grouped_engine,
    on_threads,
    parity_model,
    relative_distance,
    snapshot,
)
from stage_cases import STAGES, config_at
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from polyaccel.errors import PolyaccelError, ShardingError

stages = pytest.mark.parametrize("stage", STAGES)


class WithEngine:
    """A script's calls, to an engine."""

    def __init__(self, model: Any, config: Any, rank: int) -> None:
        self.model, self._rank = model, rank
        self.engine = grouped_engine(model, config)
        self.groups = self.engine.optimizer.param_groups

    def loss(self, step: int) -> Any:
        return self.engine(*batch(step, 0, self._rank))

    def backward(self, loss: Any, **arguments: Any) -> None:
        self.engine.backward(loss, **arguments)

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        self.engine.optimizer.zero_grad()

    def schedule(self, make: Any) -> None:
        self.engine.lr_scheduler = make(self.engine.optimizer)

    def params(self) -> Any:
        self.engine.destroy()
        return snapshot(self.model)


class WithTorch:
    """The same calls, to plain torch, which sees all ranks' batches and updates in float32."""

    def __init__(self, world: int, dtype: torch.dtype) -> None:
        self._world, self._masters, self.model = world, parity_model(), parity_model().to(dtype)
        self._optimizer = torch.optim.AdamW(grouped(self._masters), lr=1e-2)
        self._schedule: Any = None
        self.groups = self._optimizer.param_groups
        self._publish()

    def _pairs(self) -> Any:
        return zip(self.model.parameters(), self._masters.parameters(), strict=True)

    @torch.no_grad()
    def _publish(self) -> None:
        for parameter, master in self._pairs():
            parameter.copy_(master)

    def loss(self, step: int) -> Any:
        return sum(self.model(*batch(step, 0, rank)) for rank in range(self._world)) / self._world

    def backward(self, loss: Any, **arguments: Any) -> None:
        loss.backward(**arguments)

    def step(self) -> None:
        for parameter, master in self._pairs():
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        self._optimizer.step()
        self._publish()
        self.zero_grad()
        if self._schedule is not None:
            self._schedule.step()

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def schedule(self, make: Any) -> None:
        self._schedule = make(self._optimizer)

    def params(self) -> Any:
        return snapshot(self.model)


def train(run, *steps):
    for step in steps:
        run.backward(run.loss(step))
        run.step()


def learning_rates_and_decay_change(run):
    train(run, 0)
    run.groups[0]["lr"] = 3e-2
    run.groups[1]["weight_decay"] = 0.3
    train(run, 1)
    run.groups[0]["betas"] = (0.5, 0.9)
    run.groups[1]["lr"] = 0.0
    train(run, 2)


def the_schedule_is_swapped(run):
    run.schedule(lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step))
    train(run, 0, 1)
    run.schedule(lambda optimizer: ExponentialLR(optimizer, 0.8))
    train(run, 2, 3)


def steps_without_a_backward_pass(run):
    """They count, the schedule moves, and no parameter changes: an optimizer of torch skips what has no gradient."""
    run.schedule(lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step))
    run.step()
    train(run, 0)
    run.step()
    train(run, 1)


def several_backward_passes(run):
    for step in range(2):
        loss = run.loss(step)
        run.backward(loss, retain_graph=True)
        run.backward(loss)
        run.backward(run.loss(step + 5))
        run.step()


def forward_twice_before_backward(run):
    for step in range(2):
        first, second = run.loss(step), run.loss(step + 5)
        run.backward(second)
        run.backward(first)
        run.step()
        run.loss(step + 7)  # whose graph nobody uses
        run.backward(run.loss(step) + run.loss(step + 9))
        run.step()


def gradients_thrown_away(run):
    for step in range(2):
        run.backward(run.loss(step + 5))
        run.zero_grad()
        train(run, step)
        run.backward(run.loss(step + 7))
        run.zero_grad()
        run.step()


def layers_are_frozen_later(run):
    train(run, 0)
    run.model.wide.requires_grad_(False)
    run.model.embed.requires_grad_(False)
    train(run, 1, 2)
    run.model.wide.requires_grad_(True)
    train(run, 3)


ROWS = [
    learning_rates_and_decay_change,
    the_schedule_is_swapped,
    steps_without_a_backward_pass,
    several_backward_passes,
    forward_twice_before_backward,
    gradients_thrown_away,
    layers_are_frozen_later,
]


@combinations(
    script=ROWS,
    stage=list(STAGES),
    world=[2, 3, 1],
    precision=[pytest.param({}, id="fp32"), pytest.param({"bf16": {"enabled": True}}, id="bf16")],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_script_trains_as_in_plain_torch(script, stage, world, precision):
    def ours(communicator, model):
        run = WithEngine(model, config_at(stage, **precision), communicator.rank)
        script(run)
        return run.params()

    plain = WithTorch(world, torch.bfloat16 if precision else torch.float32)
    script(plain)
    wanted = plain.params()
    for params in on_threads(world, ours, parity_model):
        if precision:
            assert relative_distance(params, wanted, snapshot(parity_model())) < 0.05
        else:
            assert_close(params, wanted, 5e-6)


# What is refused.


def add_by_method(engine):
    engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.1})


def add_to_the_list(engine):
    engine.optimizer.param_groups.append({"params": [engine.module.frozen], "lr": 0.1})


def add_to_a_group(engine):
    engine.optimizer.param_groups[0]["params"].append(engine.module.frozen)


def replace_a_group_s_parameters(engine):
    engine.optimizer.param_groups[0]["params"] = [engine.module.wide.weight]


@stages
@pytest.mark.parametrize("client", [False, True], ids=["config's", "client's"])
@pytest.mark.parametrize("change", [add_by_method, add_to_the_list, add_to_a_group, replace_a_group_s_parameters])
def test_other_parameters_in_the_optimizer_s_groups_are_refused_by_name(change, client, stage):
    def changed(communicator, model):
        arguments = {"optimizer": lambda groups: torch.optim.AdamW(groups, lr=1e-2)} if client else {}
        config = config_at(stage)
        if client:
            del config["optimizer"]
        engine = grouped_engine(model, config, **arguments)
        engine.backward(engine(*batch(0, 0, communicator.rank)))

        def train_on():
            change(engine)
            engine.step()

        with pytest.raises(ShardingError) as caught:
            train_on()
        assert "polyaccel.initialize" in caught.value.hint

    on_threads(2, changed, parity_model)


@pytest.mark.parametrize("at", ["backward", "step"])
def test_a_loss_scale_that_changes_under_gradients_is_refused(at):
    """The gradients that are held were multiplied with the old one."""

    def changed(communicator, model):
        fp16 = {"enabled": True, "initial_scale_power": 4}
        engine = WithEngine(model, config_at("stage 2", fp16=fp16), communicator.rank).engine
        engine.backward(engine(*batch(0, 0, communicator.rank)))
        loss = engine(*batch(0, 1, communicator.rank))
        engine.loss_scaler.load_state_dict({"loss_scale": 8.0, "good_steps": 0, "tolerance": 1})
        with pytest.raises(PolyaccelError) as caught:
            engine.step() if at == "step" else engine.backward(loss)
        assert caught.value.value == 8.0
        assert "between optimizer steps" in caught.value.hint
        engine.zero_grad()
        engine.backward(engine(*batch(0, 0, communicator.rank)))
        engine.step()  # and the engine goes on, with the new one

    on_threads(2, changed, parity_model)
