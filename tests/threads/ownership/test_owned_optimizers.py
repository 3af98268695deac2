"""Optimizers that a script calls by itself, or that ask for more than a gradient: closures, LBFGS, learning rates that
the optimizer finds itself, changed groups, `GradScaler`."""

from __future__ import annotations

import pytest
import torch
from parity_models import (
    assert_bitwise,
    assert_close,
    batch,
    grouped,
    on_threads,
    parity_model,
    snapshot,
    train_plainly,
)
from stage_cases import config_at

import polyaccel
from polyaccel.errors import ConfigError, PolyaccelError

STEPS = 3
stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def client_config(stage, **changes):
    config = config_at(stage, **changes)
    del config["optimizer"]
    return config


def engine_for(model, config, **arguments):
    if not isinstance(arguments.get("optimizer"), torch.optim.Optimizer):
        arguments["model_parameters"] = grouped(model)
    return polyaccel.initialize(model=model, config=config, **arguments)[0]


def finished(engine):
    """Parameters of a closed engine, which are whole at every stage."""
    module = engine.module
    engine.destroy()
    return snapshot(module)


def loss_of(model, step, world):
    return sum(model(*batch(step, 0, rank)) for rank in range(world)) / world


# Closures.


@stages
def test_a_closure_is_called_once_and_its_loss_returned(stage):
    def train(communicator, model):
        engine = engine_for(model, config_at(stage))
        for step in range(STEPS):
            losses = []

            def closure(step=step, losses=losses):
                engine.optimizer.zero_grad()
                losses.append(engine(*batch(step, 0, communicator.rank)))
                engine.backward(losses[0])
                return losses[0]

            with torch.no_grad():
                assert engine.optimizer.step(closure) is losses[0]
            assert len(losses) == 1
        return finished(engine)

    for params in on_threads(2, train, parity_model):
        assert_close(params, train_plainly(2, STEPS).params)


def lbfgs(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.LBFGS(trained, lr=0.1, max_iter=4)  # a line search would decide by the last bits of a loss


@pytest.mark.parametrize("world", [1, 2, 3])
def test_lbfgs_trains_at_stage_0_and_goes_on_from_a_checkpoint(world, tmp_path):
    def train(communicator, model):
        engine = engine_for(model, client_config(0), optimizer=lbfgs(model))
        for step in range(STEPS):
            if step == 2:
                engine.save_checkpoint(str(tmp_path))
                engine.destroy()
                fresh = parity_model()
                engine = engine_for(fresh, client_config(0), optimizer=lbfgs(fresh))
                engine.load_checkpoint(str(tmp_path))

            def closure(engine=engine, step=step):
                engine.zero_grad()
                loss = engine(*batch(step, 0, communicator.rank))
                engine.backward(loss)
                return loss

            engine.optimizer.step(closure)
        return finished(engine)

    model = parity_model()
    optimizer = lbfgs(model)
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step, world)
            loss.backward()
            return loss

        optimizer.step(closure)
    ranks = on_threads(world, train, parity_model)
    for params in ranks:
        assert_close(params, snapshot(model), 1e-5)
        assert_bitwise(params, ranks[0])


def test_lbfgs_without_its_closure_says_what_to_call():
    def train(communicator, model):
        engine = engine_for(model, client_config(0), optimizer=lbfgs(model))
        engine.backward(engine(*batch(0, 0, 0)))
        with pytest.raises(PolyaccelError) as caught:
            engine.step()
        assert "engine.optimizer.step(closure)" in caught.value.hint

    on_threads(1, train, parity_model)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"stage": 1}, "zero_optimization.stage = 1"),
        ({"stage": 2, "zero_allow_untested_optimizer": True}, "zero_optimization.stage = 2"),
        ({"stage": 0, "bf16": {"enabled": True}}, "bf16.enabled"),
        ({"stage": 0, "accumulation": 2}, "gradient_accumulation_steps = 2"),
        ({"stage": 0, "gradient_clipping": 1.0}, "gradient_clipping = 1.0"),
    ],
    ids=str,
)
def test_lbfgs_is_refused_where_the_loss_cannot_be_evaluated_again(changes, key):
    with pytest.raises(ConfigError) as caught:
        on_threads(
            1, lambda _, model: engine_for(model, client_config(**changes), optimizer=lbfgs(model)), parity_model
        )
    assert all(part in str(caught.value) for part in ("LBFGS", key))


# Learning rates.


class RelativeSteps(torch.optim.SGD):
    """Finds its rate itself, as Hugging Face's Adafactor does with `lr=None`."""

    def __init__(self, groups):
        super().__init__(groups, lr=0.0)
        for group in self.param_groups:
            group["lr"] = None
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        super().step(closure)
        for group in self.param_groups:
            group["lr"] = None


@stages
def test_a_learning_rate_that_the_optimizer_finds_itself(stage):
    """The metrics have none, and nothing fails."""

    def train(communicator, model):
        config = client_config(stage, zero_allow_untested_optimizer=True)
        engine = engine_for(model, config, optimizer=RelativeSteps)
        for step in range(STEPS):
            engine.backward(engine(*batch(step, 0, communicator.rank)))
            assert engine.get_lr() == []
            engine.step()
            assert engine.metrics.lr == ()
        return finished(engine)

    for params in on_threads(2, train, parity_model):
        assert_close(params, train_plainly(2, STEPS, make_optimizer=RelativeSteps).params)


# GradScaler.


def test_a_grad_scaler_is_refused_by_name_and_a_disabled_one_is_fine():
    def train(communicator, model):
        engine = engine_for(model, config_at(2))
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        engine.backward(scaler.scale(engine(*batch(0, 0, communicator.rank))))
        scaler.step(engine.optimizer)
        scaler.update()
        trained = snapshot(model)
        scaler = torch.amp.GradScaler("cpu")
        engine.backward(scaler.scale(engine(*batch(1, 0, communicator.rank))))
        with pytest.raises(PolyaccelError) as caught:
            scaler.step(engine.optimizer)
        assert "GradScaler" in str(caught.value)
        assert '"fp16"' in caught.value.hint
        return trained

    for params in on_threads(2, train, parity_model):
        assert_close(params, train_plainly(2, 1).params)
