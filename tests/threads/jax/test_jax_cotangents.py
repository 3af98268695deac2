"""Backward passes of the user's own that are not linear get the cotangents of plain JAX, or are refused."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import jax_models  # which keeps compiled programs  # noqa: F401

import polyaccel
from polyaccel.errors import PolyaccelError
from polyaccel.jax import unit
from polyaccel.jax.program.homogeneity import require_homogeneous
from polyaccel.testkit.ranks.threads import run_threads

STEPS = 3
"""Micro-batches: no power of two."""


def with_backward(backward):
    """The identity, whose gradient is `backward(input, cotangent)`."""

    @jax.custom_vjp
    def same(value):
        return value

    same.defvjp(lambda value: (value, value), lambda value, cotangent: (backward(value, cotangent),))
    return same


NONLINEAR = {
    "clip": lambda value, cotangent: jnp.clip(cotangent, -0.05, 0.05),
    "sign": lambda value, cotangent: jnp.sign(cotangent),
    "normalize": lambda value, cotangent: cotangent / (1e-3 + jnp.linalg.norm(cotangent)),
    "clip by norm": lambda value, cotangent: cotangent * jnp.minimum(1.0, 0.1 / jnp.linalg.norm(cotangent)),
    "penalty": lambda value, cotangent: cotangent + 0.1 * value,
    "drop outliers": lambda value, cotangent: jnp.where(jnp.abs(cotangent) > 0.1, 0.0, cotangent),
    "branch": lambda value, cotangent: jax.lax.cond(
        jnp.sum(jnp.square(cotangent)) > 0.01, lambda one: one / 2, lambda one: one, cotangent
    ),
    "saturate": lambda value, cotangent: jnp.tanh(cotangent),
}
HOMOGENEOUS = {
    "reverse": lambda value, cotangent: -0.3 * cotangent,
    "gate": lambda value, cotangent: jnp.where(value > 0.0, cotangent, 0.0),
    "of signs": lambda value, cotangent: jnp.where(cotangent > 0.0, cotangent, 0.1 * cotangent),
    "rescale": lambda value, cotangent: cotangent * jnp.linalg.norm(value) / jnp.sqrt(1.0 + jnp.sum(value * value)),
    "softmax": lambda value, cotangent: (
        jax.nn.softmax(value) * (cotangent - jnp.sum(cotangent * jax.nn.softmax(value)))
    ),
    "not finite": lambda value, cotangent: jnp.nan_to_num(cotangent),
    "project": lambda value, cotangent: cotangent - value * jnp.vdot(value, cotangent) / jnp.vdot(value, value),
    "stop": lambda value, cotangent: jnp.zeros_like(cotangent),
}


def loss_with(backward):
    same = with_backward(backward)

    def loss(params, batch, rng):
        found = unit(lambda layer, x: same(x @ layer["w"]))(params["layer"], batch["x"])
        return jnp.mean((found - 1.0) ** 2)

    return loss


def params():
    return {"layer": {"w": np.ones((3, 2), np.float32)}}


def data(ranks=1):
    return np.random.default_rng(0).normal(size=(ranks, 4 * STEPS, 3)).astype(np.float32)


def config_of(**changes):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": STEPS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **changes,
    }


def plain(loss, ranks=1):
    """(weights after a step, norm) with the mean of the gradients of all micro-batches, each with a cotangent of 1."""
    parts = [part for own in data(ranks) for part in np.split(own, STEPS)]
    gradients = [jax.grad(loss)(params(), {"x": part}, None)["layer"]["w"] for part in parts]
    mean = np.mean(np.asarray(gradients, np.float64), axis=0)
    return params()["layer"]["w"] - 0.1 * mean, np.linalg.norm(mean)


def trained(loss, config, world=1):
    def go(ranks):
        engine = polyaccel.initialize(model=loss, params=params(), config=config)
        engine.train_batch({"x": data(world)[ranks.rank]})
        found = np.array(engine.params["layer"]["w"]), engine.get_global_grad_norm()
        engine.destroy()
        return found

    return run_threads(world, go)[0]


CASES = {
    "clip": {"zero_optimization": {"stage": 0}},
    "sign": {"zero_optimization": {"stage": 3}},
    "normalize": {"jax": {"execution": "native"}, "zero_optimization": {"stage": 2}},
    "clip by norm": {"activation_checkpointing": {"enabled": True}},
    "penalty": {"fp16": {"enabled": True, "loss_scale": 1}},
}


@pytest.mark.parametrize("name", CASES)
def test_a_micro_batch_has_the_cotangent_of_plain_jax(name):
    loss = loss_with(NONLINEAR[name])
    weights, norm = trained(loss, config_of(**CASES[name]))
    wanted, wanted_norm = plain(loss)
    close = 2e-3 if "fp16" in CASES[name] else 1e-6
    np.testing.assert_allclose(weights, wanted, rtol=close)
    assert norm == pytest.approx(wanted_norm, rel=close)


def test_ranks_do_not_divide_the_cotangent():
    loss = loss_with(NONLINEAR["clip"])
    weights, norm = trained(loss, config_of(zero_optimization={"stage": 2}), world=2)
    wanted, wanted_norm = plain(loss, ranks=2)
    np.testing.assert_allclose(weights, wanted, rtol=1e-6)
    assert norm == pytest.approx(wanted_norm, rel=1e-6)


def layers_with(backward):
    same = with_backward(backward)

    def first(layer, value, rng):
        return same(value @ layer["w"])

    def last(layer, value, rng):
        return jnp.mean((value[0] * layer - value[1]) ** 2)

    return [first, last], [params()["layer"], np.float32(1.0)]


def over_stages(backward, **changes):
    def go(ranks):
        model, start = layers_with(backward)
        engine = polyaccel.initialize(model=model, params=start, config=config_of(pipeline={"stages": 2}, **changes))
        engine.train_batch((data()[0], np.ones((4 * STEPS, 1), np.float32)))
        found = engine.params[0]
        return None if found is None else np.array(found["w"])

    return run_threads(2, go)[0]


def test_stages_give_the_cotangent_of_plain_jax():
    backward = NONLINEAR["clip"]
    np.testing.assert_allclose(over_stages(backward), plain(loss_with(backward))[0], rtol=1e-6)


FP16 = {"fp16": {"enabled": True}}


@pytest.mark.parametrize("changes", [{}, {"jax": {"execution": "native"}}, {"zero_optimization": {"stage": 3}}])
def test_a_loss_scale_is_refused_by_name_where_it_would_change_gradients(changes):
    with pytest.raises(PolyaccelError) as caught:
        trained(loss_with(NONLINEAR["clip"]), config_of(**FP16, **changes))
    assert str(caught.value.value).startswith("same")
    assert "bf16" in caught.value.hint


def test_a_loss_scale_is_refused_by_every_stage():
    with pytest.raises(PolyaccelError) as caught:
        over_stages(NONLINEAR["clip"], **FP16)
    assert str(caught.value.value).startswith("same")


def traced(backward):
    same = with_backward(backward)

    def loss(start):
        return jnp.sum(jax.lax.scan(lambda value, _: (jax.jit(same)(value), None), start, None, length=2)[0])

    return jax.make_jaxpr(loss)(jnp.ones(3, jnp.float16))


@pytest.mark.parametrize("name", NONLINEAR)
def test_what_does_not_scale_with_its_cotangent_is_found(name):
    with pytest.raises(PolyaccelError):
        require_homogeneous(traced(NONLINEAR[name]))


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_what_scales_with_its_cotangent_passes(name):
    require_homogeneous(traced(HOMOGENEOUS[name]))
