"""Members that engines of torch, `TrainState` or `nnx.Optimizer` have: an engine of JAX names what to do instead."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import polyaccel
from polyaccel.errors import PolyaccelError
from polyaccel.jax.missing_members import _INSTEAD
from polyaccel.testkit.ranks.threads import run_threads


def loss(params, batch, rng):
    return jnp.mean((batch @ params["w"]) ** 2)


def start(execution):
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "jax": {"execution": execution},
    }
    return polyaccel.initialize(model=loss, params={"w": np.ones((3, 2), np.float32)}, config=config)


@pytest.mark.parametrize("execution", ["views", "native"])
def test_a_member_that_engines_of_jax_lack_is_named_with_a_hint(execution):
    def use(ranks):
        engine = start(execution)
        for name, hint in _INSTEAD.items():
            assert not hasattr(engine, name)
            with pytest.raises(PolyaccelError) as caught:
                getattr(engine, name)
            assert (caught.value.value, caught.value.hint) == (name, hint)
        with pytest.raises(AttributeError) as plain:
            engine.no_such_member  # noqa: B018
        assert not isinstance(plain.value, PolyaccelError)

    run_threads(1, use)


@pytest.mark.parametrize("execution", ["views", "native"])
def test_parameters_that_are_assigned_are_refused_with_a_way_that_works(execution):
    def use(ranks):
        engine = start(execution)
        with pytest.raises(PolyaccelError) as caught:
            engine.params = {"w": np.zeros((3, 2), np.float32)}
        assert "load_state_dict" in caught.value.hint
        tree = engine.state_dict()
        tree["params"] = jax.tree.map(lambda leaf: leaf * 3, tree["params"])
        engine.load_state_dict(tree)
        return np.asarray(engine.params["w"])

    np.testing.assert_array_equal(run_threads(1, use)[0], np.full((3, 2), 3, np.float32))
