"""Averaged weights and small states in JAX: optax's numbers, stages, the exchange and back, refusals."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import optax

import polyaccel
from polyaccel.errors import ConfigError, PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads

STEPS = 3


def loss(params, batch, rng):
    return jnp.square(jnp.tanh(batch @ params["up"]) @ params["down"] - batch[:, :3]).mean()


def params():
    draw = np.random.default_rng(0)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in (("up", (6, 70)), ("down", (70, 3)))}


def batch(step):
    return np.random.default_rng(step + 1).normal(size=(2, 6)).astype(np.float32)


def engine_for(stage, optimizer, **changes):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 300}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": zero, **changes}
    return polyaccel.initialize(model=loss, params=params(), config=config)


def trained(world, stage, optimizer, **changes):
    def go(communicator):
        engine = engine_for(stage, optimizer, **changes)
        for step in range(STEPS):
            engine.train_batch(batch(step))
        weights = jax.tree.map(np.array, engine.params)
        averages = None
        if "ema" in changes or optimizer["type"] == "ScheduleFreeAdamW":
            with engine.averaged_weights():
                averages = jax.tree.map(np.array, engine.params)
                with pytest.raises(PolyaccelError):
                    engine.train_batch(batch(0))
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, engine.params), weights)
            engine.zero_grad()
            engine.train_batch(batch(STEPS))
        engine.destroy()
        return weights, averages

    return run_threads(world, go)[0]


def test_averages_are_a_loop_s_and_equal_at_all_stages():
    adamw = {"type": "AdamW", "params": {"lr": 0.01}}
    plain = optax.adamw(0.01, weight_decay=0.0)
    weights = params()
    state, wanted = plain.init(weights), None
    for step in range(STEPS):
        updates, state = plain.update(jax.grad(loss)(weights, batch(step), None), state, weights)
        weights = optax.apply_updates(weights, updates)
        wanted = weights if wanted is None else jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, wanted, weights)
    for stage in (0, 2):
        _, found = trained(2, stage, adamw, ema={"decay": 0.7})
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)


@pytest.mark.parametrize(
    "optimizer",
    [{"type": "AdamW", "params": {"lr": 0.01, "state_bits": 8}}, {"type": "ScheduleFreeAdamW", "params": {"lr": 0.01}}],
    ids=["8 bits", "schedule-free"],
)
def test_stages_have_the_same_bits(optimizer):
    wanted = trained(2, 0, optimizer)
    for stage in (1, 2):
        jax.tree.map(np.testing.assert_array_equal, trained(2, stage, optimizer), wanted)


def test_native_execution_refuses_them():
    adamw = {"type": "AdamW", "params": {"state_bits": 8}}
    native = {"jax": {"execution": "native"}}
    with pytest.raises(ConfigError):
        engine_for(0, adamw, **native)
    with pytest.raises(ConfigError):
        engine_for(0, {"type": "AdamW", "params": {}}, ema={"decay": 0.9}, **native)
