"""Replica groups of JAX functions in views mode, against optax in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import optax

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads

EVERY, STEPS = 2, 5


def loss(params, batch, rng):
    return jnp.square(jnp.tanh(batch @ params["up"]) @ params["down"] - batch[:, :3]).mean()


def params(seed=0):
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in (("up", (6, 70)), ("down", (70, 3)))}


def batch(step, rank):
    return np.random.default_rng(100 * step + rank).normal(size=(2, 6)).astype(np.float32)


def config(stage: int, **changes: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 300}
    optimizer = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}
    outer = {"replica_groups": 2, "sync_every": EVERY}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": zero, "diloco": outer}
    return config | changes


def plain():
    """The weights of each group after STEPS."""
    inner, outer = optax.adamw(0.02, weight_decay=0.1), optax.sgd(0.7, momentum=0.9, nesterov=True)
    shared = params()
    kept = outer.init(shared)
    groups = [(shared, inner.init(shared)) for _ in range(2)]
    for step in range(1, STEPS + 1):
        for index, (weights, state) in enumerate(groups):
            grads = [jax.grad(loss)(weights, batch(step, 2 * index + rank), None) for rank in range(2)]
            mean = jax.tree.map(lambda one, two: (one + two) / 2, *grads)
            updates, state = inner.update(mean, state, weights)
            groups[index] = optax.apply_updates(weights, updates), state
        if step % EVERY == 0:
            moved = jax.tree.map(lambda old, one, two: old - (one + two) / 2, shared, *(each for each, _ in groups))
            updates, kept = outer.update(moved, kept, shared)
            shared = optax.apply_updates(shared, updates)
            groups = [(shared, state) for _, state in groups]
    return [weights for weights, _ in groups]


@pytest.mark.parametrize("stage", [1, 2])
def test_outer_steps_of_a_function(stage):
    def work(communicator):
        engine = polyaccel.initialize(model=loss, params=params(communicator.rank), config=config(stage))
        for step in range(1, STEPS + 1):
            engine.train_batch(batch(step, communicator.rank))
        weights = jax.tree.map(np.array, engine.params)
        engine.destroy()
        return weights

    expected = plain()
    for rank, weights in enumerate(run_threads(4, work)):
        for name, value in expected[rank // 2].items():
            np.testing.assert_allclose(weights[name], value, rtol=2e-5, atol=2e-6)


def test_native_mode_is_refused():
    def work(communicator):
        with pytest.raises(ConfigError) as refused:
            polyaccel.initialize(model=loss, params=params(), config=config(1, jax={"execution": "native"}))
        return [problem.key for problem in refused.value.problems]

    assert run_threads(2, work) == [["diloco"]] * 2
