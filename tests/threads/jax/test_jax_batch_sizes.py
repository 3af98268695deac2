"""A JAX engine's batch size that changes in the middle of a run: each update has its own micro-batches' mean."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads

MICRO, LR = 2, 0.25


def params():
    draw = np.random.default_rng(0)
    return {"kernel": draw.normal(size=(3, 2)).astype(np.float32), "bias": np.zeros(2, np.float32)}


def micro_batch(step, index, rank):
    draw = np.random.default_rng(100 * step + 10 * index + rank)
    return draw.normal(size=(MICRO, 3)).astype(np.float32), draw.normal(size=(MICRO, 2)).astype(np.float32)


def loss_fn(params, batch, rng):
    inputs, labels = batch
    return jnp.square(inputs @ params["kernel"] + params["bias"] - labels).mean()


def first_layer(params, value, rng):
    return jnp.tanh(value @ params["kernel"])


def last_layer(params, value, rng):
    outputs, labels = value
    return jnp.square(outputs @ params - labels).mean()


def layer_params():
    draw = np.random.default_rng(1)
    return [{"kernel": draw.normal(size=(3, 4)).astype(np.float32)}, draw.normal(size=(4, 2)).astype(np.float32)]


def of_layers(params, batch, rng):
    inputs, labels = batch
    return last_layer(params[1], (first_layer(params[0], inputs, rng), labels), rng)


def plain_norms(fn, tree, windows, ranks):
    gradient, norms = jax.grad(lambda tree, batch: fn(tree, batch, None)), []
    for step, count in enumerate(windows):
        each = [gradient(tree, micro_batch(step, at, rank)) for at in range(count) for rank in range(ranks)]
        mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *each)
        norms.append(float(jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(mean)))))
        tree = jax.tree.map(lambda value, slope: value - LR * slope, tree, mean)
    return norms


def make_config(stage, **more):
    config = {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 2}
    config["optimizer"] = {"type": "SGD", "params": {"lr": LR}}
    return config | {"zero_optimization": {"stage": stage}} | more


def train(engine, windows, rank, ranks):
    norms = []
    for step, count in enumerate(windows):
        engine.set_train_batch_size(MICRO * ranks * count)
        engine.train_batch(iter([micro_batch(step, at, rank) for at in range(count)]))
        norms.append(engine.get_global_grad_norm())
    assert engine.global_samples == MICRO * ranks * sum(windows)
    with pytest.raises(ConfigError):
        engine.set_train_batch_size(MICRO * ranks + 1)
    engine.destroy()
    return norms


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 2), (2, 2), (2, 3)])
def test_each_update_has_its_own_micro_batches(stage, world):
    windows = (2, 4, 1, 3)

    def rank(communicator):
        engine = polyaccel.initialize(model=loss_fn, params=params(), config=make_config(stage))
        return train(engine, windows, communicator.rank, world)

    for found in run_threads(world, rank):
        assert found == pytest.approx(plain_norms(loss_fn, params(), windows, world), rel=1e-4)


def test_a_pipeline_of_layers_follows():
    windows = (2, 4, 3)

    def rank(communicator):
        config = make_config(0, pipeline={"stages": 2})
        engine = polyaccel.initialize(model=[first_layer, last_layer], params=layer_params(), config=config)
        return train(engine, windows, 0, 1)

    for found in run_threads(2, rank):
        assert found == pytest.approx(plain_norms(of_layers, layer_params(), windows, 1), rel=1e-4)


def test_inside_a_window_a_size_waits_for_the_next():
    def rank(communicator):
        engine = polyaccel.initialize(model=loss_fn, params=params(), config=make_config(1))
        found = []
        for index in range(2):
            engine.grad_step(micro_batch(0, index, 0))
            engine.set_train_batch_size(MICRO * 3)
            found.append(engine.gradient_accumulation_steps())
            engine.step()
        found.append(engine.gradient_accumulation_steps())
        norm = engine.get_global_grad_norm()
        engine.destroy()
        return found, norm

    ((found, norm),) = run_threads(1, rank)
    assert found == [2, 2, 3]
    assert norm == pytest.approx(plain_norms(loss_fn, params(), (2,), 1)[0], rel=1e-4)
