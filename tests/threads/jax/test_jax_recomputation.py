"""Units that are recomputed: the numbers of those that are not, and less memory."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("equinox")

import jax
import jax.numpy as jnp
from jax_block_modules import arguments
from jax_models import leaves

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.jax import scan_units, unit

WIDTH, LAYERS = 32, 4


def block(layer, hidden):
    return hidden + jnp.tanh(jnp.sin(jnp.tanh(hidden @ layer["wide"]))) @ layer["narrow"]


def weights():
    random = np.random.default_rng(0)

    def matrix(rows, columns):
        return random.standard_normal((rows, columns)).astype(np.float32) / 8

    return {"layers": [{"wide": matrix(WIDTH, 4 * WIDTH), "narrow": matrix(4 * WIDTH, WIDTH)} for _ in range(LAYERS)]}


def stacked_weights():
    return {"layers": jax.tree.map(lambda *parts: np.stack(parts), *weights()["layers"])}


def in_units(params, batch, rng):
    """With dropout in each."""

    def dropping(layer, hidden, key):
        hidden = block(layer, hidden)
        return hidden if key is None else hidden * jax.random.bernoulli(key, 0.8, hidden.shape)

    for at, layer in enumerate(params["layers"]):
        batch = unit(dropping)(layer, batch, None if rng is None else jax.random.fold_in(rng, at))
    return jnp.square(batch).mean()


def in_a_scan(params, batch, rng):
    return jnp.square(scan_units(block, batch, params["layers"])).mean()


def without_units(params, batch, rng):
    return jnp.square(block(params["layers"][0], batch)).mean()


def config(stage, way):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 4096},
        "activation_checkpointing": way,
    }


def batch(step):
    return np.random.default_rng(step).standard_normal((64, WIDTH)).astype(np.float32)


def engine_of(fn, stage, way):
    params = stacked_weights() if fn is in_a_scan else weights()
    stacked = ("layers",) if fn is in_a_scan and stage == 3 else ()
    return polyaccel.initialize(model=fn, params=params, config=config(stage, way), stacked=stacked)


def train(fn, stage, way):
    """(losses, parameters, functions that the program computes, bytes that it needs meanwhile)."""
    engine = engine_of(fn, stage, way)
    losses = [float(engine.train_batch(batch(step))) for step in range(2)]
    losses.append(float(engine.eval_batch(batch(2))))
    params, program = leaves(engine.params), engine.program(batch(0))
    engine.destroy()
    return losses, params, program.as_text().count(" tanh("), program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("fn", [in_units, in_a_scan])
@pytest.mark.parametrize("stage", [0, 3])
def test_recomputed_units_give_the_same_numbers_in_less_memory(fn, stage):
    plain, found, products = (
        train(fn, stage, way) for way in ({}, {"enabled": True}, {"enabled": True, "keep": ["matmul"]})
    )
    for one in (found, products):
        assert one[0] == pytest.approx(plain[0], rel=1e-6)  # another program of XLA's may round the last bit otherwise
        for name, value in plain[1].items():
            np.testing.assert_allclose(one[1][name], value, rtol=1e-4, atol=1e-5, err_msg=name)
        assert one[2] == 2 * plain[2]
    if (fn, stage) != (in_units, 0):  # in one long program of the CPU's, XLA recomputes when it likes
        assert found[3] < 0.6 * products[3] < 0.6 * 1.01 * plain[3]


@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox"])
def test_blocks_of_modules_are_recomputed(kind, monkeypatch):
    recomputed = []
    checkpoint = jax.checkpoint

    def noting(function, **named):
        recomputed.append(function)
        return checkpoint(function, **named)

    monkeypatch.setattr(jax, "checkpoint", noting)

    def run(way):
        engine = polyaccel.initialize(**arguments(kind), config=config(0, way))
        random = np.random.default_rng(0)
        values = {"x": random.standard_normal((4, 3), np.float32), "y": random.standard_normal(4, np.float32)}
        losses = [float(engine.train_batch(values)) for _ in range(3)]
        engine.destroy()
        return losses, len(recomputed)

    plain, found = run({}), run({"enabled": True})
    assert found[0] == pytest.approx(plain[0], rel=1e-6)
    assert found[1] > plain[1] == 0


def test_a_function_without_units_is_told_so():
    engine = engine_of(without_units, 0, {"enabled": True})
    with pytest.raises(ConfigError) as caught:
        engine.train_batch(batch(0))
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("activation_checkpointing.enabled", True)
    ]


@pytest.mark.parametrize(
    ("way", "key"),
    [({"memory_limit": "1G"}, "memory_limit"), ({"cpu_checkpointing": True}, "cpu_checkpointing")],
    ids=["limit", "host"],
)
def test_what_jax_has_not_is_refused_by_its_key(way, key):
    with pytest.raises(ConfigError) as caught:
        engine_of(in_units, 0, way)
    assert [problem.key for problem in caught.value.problems] == [f"activation_checkpointing.{key}"]
