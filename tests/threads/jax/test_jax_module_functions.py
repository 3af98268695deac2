"""A loss function that takes a module of nnx or equinox trains on an engine as in the library's own loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("equinox")
pytest.importorskip("flax")

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import polyaccel
from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.testkit.ranks.threads import run_threads

CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 40}}
STEPS = 3


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.norm(x))


def batch_of(step: int) -> dict[str, Any]:
    draw = np.random.default_rng(step)
    return {"x": draw.standard_normal((8, 4)).astype("f"), "y": draw.standard_normal((8, 1)).astype("f")}


def loss_of_nnx(module: Any, batch: Any, rng: Any = None) -> Any:
    return jnp.square(module(batch["x"]) - batch["y"]).mean()


def loss_of_equinox(module: Any, batch: Any, rng: Any = None) -> Any:
    return jnp.square(jax.vmap(module)(batch["x"]) - batch["y"]).mean()


def plain_nnx() -> tuple[list[float], Any]:
    module = Normed(nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, optax.adamw(0.02, weight_decay=0.5), wrt=nnx.Param)
    losses = []
    for step in range(STEPS):
        loss, gradients = nnx.value_and_grad(loss_of_nnx)(module, batch_of(step))
        optimizer.update(module, gradients)
        losses.append(float(loss))
    return losses, nnx.to_pure_dict(nnx.state(module))


def plain_equinox() -> tuple[list[float], Any]:
    module = eqx.nn.MLP(4, 1, 8, 2, key=jax.random.key(0))
    transformation = optax.adamw(0.02)
    state = transformation.init(eqx.filter(module, eqx.is_inexact_array))
    losses = []
    for step in range(STEPS):
        loss, gradients = eqx.filter_value_and_grad(loss_of_equinox)(module, batch_of(step))
        updates, state = transformation.update(gradients, state, eqx.filter(module, eqx.is_inexact_array))
        module = eqx.apply_updates(module, updates)
        losses.append(float(loss))
    return losses, eqx.filter(module, eqx.is_inexact_array)


@pytest.mark.parametrize("given", ["Optimizer", "ModelAndOptimizer", "optax"])
def test_a_loss_of_nnx_trains_its_module(given: str) -> None:
    def train(ranks: Any) -> None:
        module, recipe = Normed(nnx.Rngs(0)), optax.adamw(0.02, weight_decay=0.5)
        arguments = {
            "Optimizer": lambda: {"params": module, "optimizer": nnx.Optimizer(module, recipe, wrt=nnx.Param)},
            "ModelAndOptimizer": lambda: {"params": nnx.ModelAndOptimizer(module, recipe, wrt=nnx.Param)},
            "optax": lambda: {"params": module, "optimizer": recipe},
        }[given]()
        engine = polyaccel.initialize(model=loss_of_nnx, config=CONFIG, **arguments)
        losses = [float(engine.train_batch(batch_of(step))) for step in range(STEPS)]
        nnx.update(module, engine.params)
        nnx.update(module, engine.state)
        engine.destroy()
        np.testing.assert_allclose(losses, wanted[0], rtol=1e-6)
        found = nnx.to_pure_dict(nnx.state(module))
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6), found, wanted[1])

    wanted = plain_nnx()
    run_threads(1, train)


def test_a_loss_of_equinox_trains_its_module_on_ranks() -> None:
    def train(ranks: Any) -> None:
        module = eqx.nn.MLP(4, 1, 8, 2, key=jax.random.key(0))
        engine = polyaccel.initialize(model=loss_of_equinox, params=module, optimizer=optax.adamw(0.02), config=CONFIG)
        half = slice(4 * ranks.rank, 4 * ranks.rank + 4)
        for step in range(STEPS):
            engine.train_batch({name: part[half] for name, part in batch_of(step).items()})
        found = jax.tree.leaves(engine.params)
        trained = eqx.combine(engine.params, module)
        assert trained(jnp.ones(4)).shape == (1,)
        engine.destroy()
        for one, other in zip(found, jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)

    _, wanted = plain_equinox()
    run_threads(2, train)


def test_a_function_combines_the_parts_of_a_module_itself() -> None:
    """Layers that repeat, and a switch of dropout that is in the other part."""
    first, second, third = jax.random.split(jax.random.key(1), 3)
    layers = [eqx.nn.Linear(4, 4, key=first), eqx.nn.Dropout(0.0), eqx.nn.Linear(4, 4, key=second)]
    module = eqx.nn.Sequential([*layers, eqx.nn.Linear(4, 1, key=third)])
    params, static = eqx.partition(module, eqx.is_inexact_array)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        whole = eqx.nn.inference_mode(eqx.combine(params, static))
        return jnp.square(jax.vmap(whole)(batch["x"]) - batch["y"]).mean()

    engine = polyaccel.initialize(model=loss, params=params, optimizer=optax.adamw(0.02), config=CONFIG)
    transformation = optax.adamw(0.02)
    state = transformation.init(params)
    for step in range(STEPS):
        gradients = jax.grad(loss)(params, batch_of(step), None)
        updates, state = transformation.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        engine.train_batch(batch_of(step))
    for one, other in zip(jax.tree.leaves(engine.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    engine.destroy()


def test_several_modules_train_together() -> None:
    def train(ranks: Any) -> None:
        modules = {"first": Normed(nnx.Rngs(0)), "second": Normed(nnx.Rngs(1))}
        engine = polyaccel.initialize(
            model=lambda modules, batch, rng: jnp.square(modules["first"](batch) + modules["second"](batch)).mean(),
            params=modules,
            optimizer=optax.sgd(0.1),
            config=CONFIG,
        )
        losses = [float(engine.train_batch(batch_of(0)["x"])) for _ in range(STEPS)]
        assert losses[-1] < losses[0]
        assert engine.state.keys() == engine.params.keys() == modules.keys()
        engine.destroy()

    run_threads(1, train)


def test_statistics_of_nnx_are_no_parameters() -> None:
    def build(ranks: Any) -> None:
        with pytest.raises(ShardingError) as error:
            polyaccel.initialize(
                model=loss_of_nnx, params=nnx.state(Normed(nnx.Rngs(0))), optimizer=optax.sgd(0.1), config=CONFIG
            )
        assert error.value.value == "BatchStat"

    run_threads(1, build)


class Adapted(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.base, self.lora = nnx.Linear(4, 1, rngs=rngs), nnx.LoRA(4, 2, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.base(x) + self.lora(x)


def muon() -> Any:
    return optax.chain(optax.clip_by_global_norm(0.3), optax.contrib.muon(0.05, weight_decay=0.5))


def adamw() -> Any:
    return optax.adamw(0.1, weight_decay=0.5)


def adapted(recipe: Any, steps: int) -> tuple[Any, Any]:
    """A module of which an optimizer of flax has trained the LoRA parameters alone."""
    module = Adapted(nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, recipe(), wrt=nnx.LoRAParam)
    for step in range(steps):
        gradients = nnx.grad(loss_of_nnx, argnums=nnx.DiffState(0, nnx.LoRAParam))(module, batch_of(step))
        optimizer.update(module, gradients)
    return module, optimizer


@pytest.mark.parametrize(("recipe", "taken", "ranks"), [(adamw, 0, 1), (adamw, 2, 2), (muon, 1, 2)])
def test_an_optimizer_of_some_parameters_leaves_the_others(recipe: Any, taken: int, ranks: int) -> None:
    """Where it has taken steps, the engine continues."""

    def train(ranks: Any) -> None:
        module, optimizer = adapted(recipe, taken)
        engine = polyaccel.initialize(model=loss_of_nnx, params=module, optimizer=optimizer, config=CONFIG)
        assert engine.global_steps == taken
        count = 8 // ranks.world_size
        part = slice(count * ranks.rank, count * ranks.rank + count)
        for step in range(taken, STEPS):
            engine.train_batch({name: value[part] for name, value in batch_of(step).items()})
        found = engine.params
        engine.destroy()
        jax.tree.map(np.testing.assert_array_equal, found["base"], nnx.to_pure_dict(nnx.state(module.base)))
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6), found, wanted)

    wanted = nnx.to_pure_dict(nnx.state(adapted(recipe, STEPS)[0]))
    run_threads(ranks, train)


def test_a_function_of_two_arguments_is_refused() -> None:
    def build(ranks: Any) -> None:
        with pytest.raises(PolyaccelError) as error:
            polyaccel.initialize(
                model=lambda params, batch: 0.0, params=np.ones(3), optimizer=optax.sgd(0.1), config=CONFIG
            )
        assert error.value.value == "(params, batch)"

    run_threads(1, build)
