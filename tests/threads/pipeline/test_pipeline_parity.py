"""Stages of a pipeline train as one rank does: bit by bit, whatever the schedule and the stage of ZeRO."""

from __future__ import annotations

from copy import deepcopy
from functools import cache, partial

import pytest
import torch
from pairwise import combinations
from pipeline_models import (
    MICRO_BATCHES,
    Figures,
    assert_same,
    micro_batch,
    pipeline_config,
    plain_layers,
    plain_model,
    tied_model,
    trained,
    words,
)
from torch import nn

import polyaccel
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.pipeline import PipelineModule


@cache
def plainly(data: int, stage: int) -> Figures:
    """What an ordinary engine makes of the same layers, by forward, backward and step."""

    def run(communicator):
        model = nn.Sequential(*plain_layers())
        config = pipeline_config(stage)
        engine, *_ = polyaccel.initialize(model=model, config={**config, "pipeline": {}})
        found = Figures(losses={communicator.rank: []})
        for step in range(3):
            losses = []
            for micro in range(MICRO_BATCHES):
                inputs, labels = micro_batch(step, micro, communicator.rank)
                loss = nn.functional.mse_loss(engine(inputs), labels)
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            found.losses[communicator.rank].append(float(torch.stack(losses).mean()))
            found.norms.append(engine.get_global_grad_norm())
            found.scales.append(engine.get_loss_scale())
        found.values = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return found

    ranks = run_threads(data, run)
    for other in ranks[1:]:
        ranks[0].losses |= other.losses
    return ranks[0]


@combinations(stages=[1, 2, 3], data=[1, 2], schedule=["gpipe", "1f1b"], stage=[0, 1, 2, 3], interval=[0, 2])
def test_stages_train_as_an_ordinary_engine_does(stages, data, schedule, stage, interval):
    model = partial(plain_model, activation_checkpoint_interval=interval)
    assert_same(trained(stages, data, pipeline_config(stage, schedule), model=model), plainly(data, stage))


@combinations(stages=[2, 3], data=[1, 2], schedule=["gpipe", "1f1b"], stage=[0, 1, 2, 3])
def test_tied_weights_are_one_parameter(stages, data, schedule, stage):
    """Two stages sum their gradients apart, in another order than one rank does."""
    one = trained(1, data, pipeline_config(stage, schedule), model=tied_model, make=words)
    found = trained(stages, data, pipeline_config(stage, schedule), model=tied_model, make=words)
    assert found.values.keys() == one.values.keys()
    for place, losses in one.losses.items():
        assert found.losses[place] == pytest.approx(losses, rel=1e-6)
    assert found.norms == pytest.approx(one.norms, rel=1e-6)
    for name, value in one.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-5, atol=1e-6)


def test_an_overflow_on_one_stage_is_skipped_by_all():
    """An input of 900 makes the gradients of the first layer overflow in float16, and no others."""
    layers = [nn.Linear(6, 7), nn.Linear(7, 5)]
    with torch.no_grad():
        layers[0].weight[:, 0] *= 1e-3
    fp16 = {"enabled": True, "initial_scale_power": 12, "hysteresis": 1, "auto_cast": True}
    config = pipeline_config(1, fp16=fp16, gradient_clipping=0.0)

    def run(communicator):
        model = PipelineModule(deepcopy(layers), communicator.world_size, loss_fn=nn.functional.mse_loss)
        engine, *_ = polyaccel.initialize(model=model, config=config)
        found = []
        for step in range(6):
            source = [micro_batch(step, micro, 0) for micro in range(MICRO_BATCHES)]
            for inputs, _ in source:
                inputs[:, 0] = 900.0
            loss = float(engine.train_batch(iter(source)))
            found.append(
                (loss, engine.get_loss_scale(), engine.was_step_applied(), engine._result.first_nonfinite_param)
            )
        engine.destroy()
        return found

    (one,) = run_threads(1, run)
    assert {culprit for _, _, _, culprit in one} == {"0.weight", None}
    assert {applied for _, _, applied, _ in one} == {True, False}
    assert run_threads(2, run) == [one, one]


def test_a_stage_may_have_no_parameters():
    layer = nn.Linear(6, 5)

    def model(stages):
        layers = [deepcopy(layer), nn.Tanh(), nn.GELU()]
        return PipelineModule(layers, stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")

    config = pipeline_config(2)
    assert_same(trained(3, 1, config, model=model), trained(1, 1, config, model=model))
