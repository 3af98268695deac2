"""`polyaccel.utils.safe_get_*` and `safe_set_*`: what one parameter's states are, read and written, at every stage."""

from __future__ import annotations

import pytest
import torch
from parity_models import batch, grouped_engine, make_config, on_threads, parity_model, snapshot, train_plainly
from torch import nn

import polyaccel
from polyaccel import utils, zero
from polyaccel.errors import PolyaccelError, ShardingError

STAGES = (0, 1, 2, 3)
WORLD = 3
ZERO = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 10}


def engine_of(model: nn.Module, stage: int, **changes) -> polyaccel.TorchEngine:
    config = make_config(stage, zero=ZERO, **changes)
    return grouped_engine(model, config)


def backward(engine, step: int, micro: int, rank: int) -> None:
    engine.backward(engine(*batch(step, micro, rank)))


def plain_gradients(accumulation: int) -> dict[str, torch.Tensor | None]:
    """The average over ranks and micro-batches of the first step."""
    model = parity_model()
    for rank in range(WORLD):
        for micro in range(accumulation):
            (model(*batch(0, micro, rank)) / accumulation / WORLD).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("precision", [{}, {"fp16": {"enabled": True, "initial_scale_power": 8}}], ids=["fp32", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_the_unscaled_average_between_backward_and_step(stage, precision):
    def work(communicator, model):
        engine = engine_of(model, stage, accumulation=2, **precision)
        parameters = dict(model.named_parameters())
        assert utils.safe_get_full_grad(parameters["wide.weight"]) is None
        for micro in range(2):
            backward(engine, 0, micro, communicator.rank)
            if micro == 0:
                engine.step()
        found = {name: utils.safe_get_full_grad(parameter) for name, parameter in parameters.items()}
        local = utils.safe_get_local_grad(parameters["wide.weight"])
        engine.step()
        assert utils.safe_get_full_grad(parameters["wide.weight"]) is None
        return found, local

    wanted = plain_gradients(2)
    results = on_threads(WORLD, work, parity_model)
    for found, _ in results:
        for name, gradient in wanted.items():
            if gradient is None:
                assert found[name] is None, name
            else:
                tolerance = 1e-6 if not precision else 3e-3
                assert torch.allclose(found[name], gradient, atol=tolerance), name
    pieces = torch.cat([local for _, local in results]) if stage else results[0][1]
    assert torch.equal(pieces, results[0][0]["wide.weight"].flatten())


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_was_set_is_the_one_that_updates(stage):
    """Doubled gradients and gradient norms, as if the loss had been doubled (SGD)."""
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}

    def work(communicator, model, doubles):
        engine = engine_of(model, stage, **sgd)
        loss = engine(*batch(0, 0, communicator.rank))
        engine.backward(loss if doubles else loss * 2.0)
        if doubles:
            for parameter in model.parameters():
                gradient = utils.safe_get_full_grad(parameter) if parameter.requires_grad else None
                if gradient is not None:
                    utils.safe_set_full_grad(parameter, gradient * 2.0)
        engine.step()
        norm = engine.get_global_grad_norm()
        engine.destroy()
        return snapshot(model), norm

    (set_params, set_norm), (params, norm) = (on_threads(WORLD, work, parity_model, how)[0] for how in (True, False))
    assert set_norm == pytest.approx(norm, rel=1e-6)
    assert all(torch.allclose(set_params[name], params[name], atol=1e-6) for name in params)


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_masters_and_moments_are_those_of_a_plain_optimizer(stage, precision):
    def work(communicator, model):
        start = {name: utils.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
        assert set(start.values()) == {None}
        wanted = snapshot(model)
        engine = engine_of(model, stage, **precision)
        masters = {name: utils.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
        if not precision:
            assert all(torch.equal(masters[name], wanted[name]) for name in wanted)
        else:  # the original values, not those that bf16 rounds them to; the frozen one has no master weights
            assert all(torch.equal(masters[name], wanted[name]) for name in wanted if name != "frozen")
        backward(engine, 0, 0, communicator.rank)
        gradient = utils.safe_get_full_grad(model.wide.weight)
        engine.step()
        moments = [utils.safe_get_full_optimizer_state(model.wide.weight, key) for key in ("exp_avg", "exp_avg_sq")]
        assert torch.allclose(moments[0], 0.1 * gradient, rtol=1e-5)
        assert torch.allclose(moments[1], 0.001 * gradient**2, rtol=1e-5)
        assert moments[0].shape == model.wide.weight.shape
        with pytest.raises(ShardingError) as caught:
            utils.safe_get_full_optimizer_state(model.wide.weight, "momentum")
        assert caught.value.value == "momentum"

    on_threads(WORLD, work, parity_model)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_set_is_what_trains(stage, precision, local):
    """Every parameter and every state written back by hand, to values of another run, continues that run."""

    def source(communicator, model):
        engine = engine_of(model, stage, **precision)
        for step in range(2):
            backward(engine, step, 0, communicator.rank)
            engine.step()
        get = [utils.safe_get_full_fp32_param, utils.safe_get_local_fp32_param][local]
        get_state = [utils.safe_get_full_optimizer_state, utils.safe_get_local_optimizer_state][local]
        states = {
            name: (get(p), *(get_state(p, key) for key in ("exp_avg", "exp_avg_sq") if p.requires_grad))
            for name, p in model.named_parameters()
        }
        backward(engine, 2, 0, communicator.rank)
        engine.step()
        engine.destroy()
        return states, snapshot(model)

    def target(communicator, model, states):
        engine = engine_of(model, stage, **precision)
        for step in range(2):  # so that the bias correction counts alike
            backward(engine, 7 + step, 1, communicator.rank)
            engine.step()
        set_param = [utils.safe_set_full_fp32_param, utils.safe_set_local_fp32_param][local]
        set_state = [utils.safe_set_full_optimizer_state, utils.safe_set_local_optimizer_state][local]
        for name, parameter in model.named_parameters():
            value, *moments = states[communicator.rank][name]
            set_param(parameter, value)
            for key, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=False):
                set_state(parameter, moment, key)
        backward(engine, 2, 0, communicator.rank)
        engine.step()
        engine.destroy()
        return snapshot(model)

    ranks = on_threads(WORLD, source, parity_model)
    found = on_threads(WORLD, target, parity_model, [states for states, _ in ranks])
    for params in found:
        assert all(torch.equal(params[name], ranks[0][1][name]) for name in params)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_set_is_seen_at_once_by_those_who_look(stage):
    def work(communicator, model):
        engine_of(model, stage)
        weight = model.wide.weight
        with zero.GatheredParameters(weight):
            utils.safe_set_full_fp32_param(weight, torch.full((33, 6), 2.0))
            assert weight.unique().tolist() == [2.0]
            utils.safe_set_local_fp32_param(weight, utils.safe_get_local_fp32_param(weight) + 1.0)
            assert weight.unique().tolist() == [3.0]

    on_threads(WORLD, work, parity_model)


@pytest.mark.parametrize("stage", STAGES)
def test_mistakes_are_named(stage):
    def work(communicator, model):
        engine = engine_of(model, stage)
        with pytest.raises(ShardingError) as caught:
            utils.safe_set_full_fp32_param(model.wide.weight, torch.zeros(2, 2))
        assert caught.value.value == (2, 2)
        assert "'wide.weight'" in str(caught.value)
        with pytest.raises(ShardingError) as caught:
            utils.safe_set_local_optimizer_state(model.wide.weight, torch.zeros(1), "exp_avg")
        assert caught.value.value == 1
        with pytest.raises(PolyaccelError) as caught:
            utils.safe_set_full_grad(model.wide.weight, torch.zeros(33, 6))
        assert "'wide.weight'" in str(caught.value)
        with pytest.raises(ShardingError) as caught:
            utils.safe_set_full_fp32_param(nn.Parameter(torch.zeros(2)), torch.zeros(2))
        assert caught.value.value == (2,)
        assert utils.safe_get_full_grad(nn.Parameter(torch.zeros(2))) is None
        engine.destroy()
        assert utils.safe_get_full_fp32_param(model.wide.weight) is None

    on_threads(2, work, parity_model)


def test_reading_changes_nothing():
    """Gradients asked for after every micro-batch, late ones too, leave the run as it is."""

    def work(communicator, model, asks):
        engine = engine_of(model, 3, accumulation=2)
        for step in range(2):
            for micro in range(2):
                backward(engine, step, micro, communicator.rank)
                if asks:
                    assert utils.safe_get_full_grad(model.twice.weight).abs().sum() > 0
                engine.step()
        engine.destroy()
        return snapshot(model)

    asked, left = (on_threads(2, work, parity_model, asks)[0] for asks in (True, False))
    assert all(torch.equal(asked[name], left[name]) for name in left)
    plain = train_plainly(2, 2, accumulation=2).params
    assert all(torch.allclose(left[name], plain[name], atol=2e-6) for name in plain)
