"""Rewrites of a JAX function: one list in order, what each changed, and requests that are refused before any of it."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

import jax.numpy as jnp

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.jax import unit
from polyaccel.jax.rewrites import REWRITES
from polyaccel.testkit.ranks.threads import run_threads

WIDTH = 4


def block(params, value, rng=None):
    return jnp.tanh(value @ params["kernel"])


def head(params, value, rng):
    given, labels = value
    return jnp.square(given @ params["kernel"] - labels).mean()


def in_units(params, batch, rng):
    for layer in params:
        batch = unit(block)(layer, batch)
    return jnp.square(batch).mean()


def params_of(layers):
    return [{"kernel": np.full((WIDTH, WIDTH), 0.1, np.float32)} for _ in range(layers)]


def config_of(stage, **changes):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 16}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": zero, **changes}


def test_the_engine_applies_the_last_ones():
    names = [one.name for one in REWRITES]
    assert names.index("pipeline") < names.index("precision") < names.index("zero_optimization")
    assert [one.needs_engine for one in REWRITES] == sorted(one.needs_engine for one in REWRITES)


@pytest.mark.parametrize("stage", [0, 3])
def test_each_rewrite_states_what_it_changed(stage):
    changes = {"bf16": {"enabled": True}, "activation_checkpointing": {"enabled": True}}
    config = config_of(stage, gradient_accumulation_steps=3, **changes)
    params = params_of(2)
    engine = polyaccel.initialize(model=in_units, params=params, config=config)
    applied = engine.rewrites
    engine.train_batch(np.ones((6, WIDTH), np.float32))
    engine.destroy()
    found = {one.name: one for one in applied}
    assert [one.name for one in REWRITES if one.name in found] == [one.name for one in applied]
    everything = {"0.kernel", "1.kernel"}
    assert set(found) == {
        *("optimizer", "precision", "activation_checkpointing", "gradient_accumulation_steps", "zero_optimization")
    }
    assert found["gradient_accumulation_steps"].batch_parts == 3
    assert set(found["precision"].parameters) == set(found["zero_optimization"].parameters) == everything
    assert set(found["zero_optimization"].modules) == ({"0", "1"} if stage == 3 else set())
    assert engine.rewrites == ()
    np.testing.assert_array_equal(params[0]["kernel"], params_of(1)[0]["kernel"])  # the caller's are as they were


def test_stages_have_their_own_layers():
    def run(communicator):
        config = config_of(0, mesh={"pipe": 2}, gradient_accumulation_steps=2)
        engine = polyaccel.initialize(model=[block, block, block, head], params=params_of(4), config=config)
        applied = engine.rewrites
        engine.destroy()
        return {one.name: one for one in applied}

    first, last = run_threads(2, run)
    assert first["model"].modules == ("0", "1", "2", "3")
    assert first["pipeline"].modules == ("2", "3")
    assert last["pipeline"].parameters == ("0.kernel", "1.kernel")
    assert set(last["zero_optimization"].parameters) == {"2.kernel", "3.kernel"}


def test_problems_of_all_rewrites_are_reported_at_once():
    changes = {
        "jax": {"execution": "native"},
        "comms_logger": {"enabled": True},
        "activation_checkpointing": {"enabled": True, "keep": ["attention"]},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    }
    with pytest.raises(ConfigError) as caught:
        polyaccel.initialize(model=in_units, params=params_of(1), config=config_of(3, **changes))
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {"zero_optimization.offload_param.device", "comms_logger.enabled", "activation_checkpointing.keep"}
