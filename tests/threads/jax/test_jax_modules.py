"""Modules of flax and equinox, and transformations of optax, under the engine beside the same training without it."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("equinox")
pytest.importorskip("optax")

import equinox
import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from jax_models import leaves, make_config

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads

SGD = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 16},
}


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, y):
        hidden = linen.tanh(linen.Dense(5)(x))
        hidden = linen.Dropout(0.5, deterministic=not self.has_rng("dropout"))(hidden)
        return jnp.square(linen.Dense(2)(hidden) - y).mean()


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(3, 5, rngs=rngs), nnx.Linear(5, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, y):
        return jnp.square(self.second(self.dropout(jnp.tanh(self.first(x)))) - y).mean()


class Equinox(equinox.Module):
    first: equinox.nn.Linear
    second: equinox.nn.Linear
    dropout: equinox.nn.Dropout

    def __init__(self, key):
        one, other = jax.random.split(key)
        self.first, self.second = equinox.nn.Linear(3, 5, key=one), equinox.nn.Linear(5, 2, key=other)
        self.dropout = equinox.nn.Dropout(0.5)

    def __call__(self, x, y, key=None):
        hidden = self.dropout(jnp.tanh(jax.vmap(self.first)(x)), key=key, inference=key is None)
        return jnp.square(jax.vmap(self.second)(hidden) - y).mean()


def data(at, rank=0):
    random = np.random.default_rng([at, rank])
    return {
        "x": random.standard_normal((4, 3), dtype=np.float32),
        "y": random.standard_normal((4, 2), dtype=np.float32),
    }


def build(kind):
    """(arguments of initialize, plain loss function of (parameters, batch) in evaluation, parameters)."""
    if kind == "linen":
        model = Linen()
        variables = model.init(jax.random.key(0), **data(0))
        return {"model": model, "params": variables}, lambda p, b: model.apply({"params": p}, **b), variables["params"]
    if kind == "nnx":
        model = Nnx(nnx.Rngs(0))
        model.eval()
        graph, state, rest = nnx.split(model, nnx.Param, ...)
        return {"model": model}, lambda p, b: nnx.merge(graph, p, rest)(**b), state
    model = Equinox(jax.random.key(0))
    return {"model": model}, lambda p, b: p(**b), model


@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox"])
def test_a_module_trains_with_dropout_and_is_evaluated_without(kind):
    arguments, plain, params = build(kind)

    def go(ranks):
        engine = polyaccel.initialize(**arguments, config=SGD)
        np.testing.assert_allclose(engine.eval_batch(data(0)), plain(params, data(0)), rtol=1e-6)
        before = float(engine.eval_batch(data(0)))
        assert float(engine.grad_step(data(0))) != before  # some units were dropped
        engine.zero_grad()
        for _ in range(30):
            engine.train_batch(data(0))
        assert float(engine.eval_batch(data(0))) < before
        return leaves(engine.params)

    names = run_threads(1, go)[0].keys()
    firsts = {"linen": "Dense_0.kernel", "nnx": "first.kernel", "equinox": "first.weight"}
    assert firsts[kind] in names
    assert len(names) == 4


def loss(params, batch, rng):
    return jnp.square(jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]).mean()


def start():
    random = np.random.default_rng(0)
    return {
        "w": random.standard_normal((3, 5), dtype=np.float32),
        "v": random.standard_normal((5, 2), dtype=np.float32),
    }


TRANSFORMATIONS = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "scheduled": lambda: optax.adam(optax.linear_schedule(1e-2, 0.0, 10)),
    "adagrad": lambda: optax.adagrad(1e-2),
    "lion": lambda: optax.lion(1e-2),
}


@pytest.mark.parametrize(("name", "stage"), [*((name, 2) for name in TRANSFORMATIONS), ("scheduled", 0)])
def test_a_transformation_of_optax_replaces_the_configs_optimizer(name, stage, tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 12},
    }

    def go(ranks):
        def make():
            return polyaccel.initialize(model=loss, params=start(), optimizer=TRANSFORMATIONS[name](), config=config)

        engine = make()
        for at in range(3):
            engine.train_batch(data(at, ranks.rank))
        engine.save_checkpoint(str(tmp_path))
        engine = make()
        engine.load_checkpoint(str(tmp_path))
        for at in range(3, 6):
            engine.train_batch(data(at, ranks.rank))
        return leaves(engine.params)

    found = run_threads(2, go)[0]
    transformation = TRANSFORMATIONS[name]()
    params = jax.tree.map(jnp.asarray, start())
    state = transformation.init(params)
    for at in range(6):
        grads = [jax.grad(loss)(params, data(at, rank), None) for rank in range(2)]
        mean = jax.tree.map(lambda one, other: (one + other) / 2, *grads)
        updates, state = transformation.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    for fqn, value in leaves(params).items():
        np.testing.assert_allclose(found[fqn], value, rtol=1e-4, atol=1e-6)


def test_a_schedule_of_the_config_needs_its_optimizer():
    with pytest.raises(ConfigError) as caught:
        run_threads(
            1,
            lambda _: polyaccel.initialize(model=loss, params=start(), optimizer=optax.sgd(0.1), config=make_config(1)),
        )
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("scheduler.type", "WarmupLR")]
