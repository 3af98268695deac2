"""Client optimizers that look at more than an element are refused where ZeRO cuts parameters, whatever the config says.

Others are taken, and the trial that decides it changes nothing.
"""

from __future__ import annotations

import copy
import logging
import random

import numpy as np
import pytest
import torch
from own_optimizers import (
    REFUSED,
    TORCH,
    WHOLE,
    CountedMomentum,
    Net,
    Noisy,
    Sign,
    Subclass,
    TinyRate,
    grouped,
)

import polyaccel
from polyaccel.errors import ShardingError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.api.optimizer_proof import try_on_slices


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 3), (3, 1)])
def test_an_optimizer_that_needs_all_parameters_is_refused_whatever_the_config_says(name, stage, world):
    kinds = []

    def go(_):
        torch.manual_seed(0)
        optimizer = REFUSED[name](model := Net())
        kinds.append(type(optimizer).__name__)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        }
        with pytest.raises(ShardingError) as caught:
            polyaccel.initialize(model=model, optimizer=optimizer, config=config)
        assert caught.value.value == kinds[0]
        assert '"stage": 0' in caught.value.hint

    run_threads(world, go)


@pytest.mark.parametrize("name", [name for name in WHOLE | REFUSED if name != "StepsItsModel"])
def test_stage_0_has_whole_parameters(name):
    """Numbers of plain torch."""

    def train(model, optimizer, engine=None):
        for step in range(3):
            x = torch.randn(2, 6, generator=torch.Generator().manual_seed(step))
            if engine is None:
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
            else:
                engine.backward(engine(x))
                engine.step()
        return [each.detach().clone() for each in model.parameters()]

    def go(_):
        torch.manual_seed(0)
        model = Net()
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}}
        engine, *_ = polyaccel.initialize(model=model, optimizer=(WHOLE | REFUSED)[name](model), config=config)
        found = train(model, None, engine)
        engine.destroy()
        return found

    torch.manual_seed(0)
    plain = Net()
    wanted = train(plain, (WHOLE | REFUSED)[name](plain))
    for one, other in zip(run_threads(1, go)[0], wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


ELEMENTWISE = {
    f"{kind.__name__} {arguments or ''}".strip(): lambda model, kind=kind, arguments=arguments: kind(
        grouped(model), lr=1e-2, **arguments
    )
    for kind, each in {
        TORCH.Adadelta: ({}, {"foreach": True}, {"maximize": True}),
        TORCH.Adagrad: ({}, {"foreach": True}, {"fused": True}, {"initial_accumulator_value": 0.1}),
        TORCH.Adam: ({}, {"foreach": True}, {"fused": True}, {"amsgrad": True}),
        TORCH.AdamW: ({}, {"foreach": True}, {"fused": True}, {"maximize": True}),
        TORCH.Adamax: ({}, {"foreach": True}),
        TORCH.ASGD: ({}, {"foreach": True}),
        TORCH.NAdam: ({}, {"foreach": True}, {"decoupled_weight_decay": True}),
        TORCH.RAdam: ({}, {"foreach": True}),
        TORCH.RMSprop: ({}, {"foreach": True}, {"momentum": 0.9, "centered": True}),
        TORCH.Rprop: ({}, {"foreach": True}),
        TORCH.SGD: ({}, {"foreach": True}, {"fused": True}, {"momentum": 0.9, "nesterov": True}),
    }.items()
    for arguments in each
} | {
    kind.__name__: lambda model, kind=kind: kind(grouped(model)) for kind in (Sign, CountedMomentum, TinyRate, Subclass)
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_trial_knows_elementwise_optimizers_and_changes_nothing(name):
    """With a past of its own too: its states are cut along."""
    torch.manual_seed(0)
    model = Net()
    optimizer = ELEMENTWISE[name](model)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    TORCH.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for past in range(2):
        before = [each.detach().clone() for each in model.parameters()]
        states = repr(optimizer.state_dict())
        seeds = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
        assert try_on_slices(optimizer) == type(try_on_slices(optimizer))()
        assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
        assert repr(optimizer.state_dict()) == states
        assert torch.equal(torch.get_rng_state(), seeds[0])
        assert (random.getstate(), repr(np.random.get_state())) == seeds[1:]
        assert len(called) == past
        model(torch.ones(2, 6)).backward()
        optimizer.step()


class Unique(Sign):
    """It cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("there is one")

    def __init__(self, params):
        super().__init__(params)
        self.lock = __import__("threading").Lock()


@pytest.mark.parametrize("kind", [Noisy, Unique], ids=["it draws", "it cannot be copied"])
def test_what_cannot_be_tried_is_taken_at_its_user_s_word_with_a_warning(kind, caplog):
    def go(_):
        model = Net()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2},
        }
        polyaccel.initialize(model=model, optimizer=kind(grouped(model)), config=config)[0].destroy()

    with caplog.at_level(logging.WARNING, logger="polyaccel"):
        run_threads(1, go)
    assert [record.args[0] for record in caplog.records if record.args] == [kind.__name__]


def test_a_trained_element_follows_its_own_gradient_alone():
    """The engine's numbers for what the trial found elementwise are those of plain torch."""

    def inputs(step, rank):
        return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank))

    torch.manual_seed(0)
    plain = Net()
    models = [copy.deepcopy(plain) for _ in range(3)]  # here, for ranks that are threads have one generator

    def go(ranks):
        model = models[ranks.rank]
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2},
        }
        engine, *_ = polyaccel.initialize(model=model, optimizer=CountedMomentum(grouped(model)), config=config)
        for step in range(3):
            engine.backward(engine(inputs(step, ranks.rank)))
            engine.step()
        found = [each.detach().clone() for each in model.parameters()]
        engine.destroy()
        return found

    optimizer = CountedMomentum(grouped(plain))
    for step in range(3):
        optimizer.zero_grad()
        (sum(plain(inputs(step, rank)) for rank in range(3)) / 3).backward()
        optimizer.step()
    for found in run_threads(3, go):
        for one, other in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
