"""Stages of a pipeline whose layers carry state, under transformations of optax that need whole parameters, train as
plain jit and optax do."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax

import polyaccel
from polyaccel.errors import PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads

MICRO_BATCHES, STEPS = 3, 3


def normed(params: Any, state: Any, value: Any, rng: Any) -> Any:
    """Running mean, and a count."""
    mean = value.mean(0) if rng is not None else state["mean"]
    hidden = jnp.tanh((value - mean) @ params["kernel"] * params["mean"])
    return hidden, {"mean": 0.9 * state["mean"] + 0.1 * value.mean(0), "seen": state["seen"] + 1}


def dense(params: Any, value: Any, rng: Any) -> Any:
    return jnp.tanh(value @ params)


def head(params: Any, state: Any, value: Any, rng: Any) -> Any:
    given, labels = value
    loss = jnp.square(given @ params - labels).mean()
    return loss, ({"loss": 0.5 * state["loss"] + 0.5 * loss}, {"first": given[0, 0]})


LAYERS: list[Any] = [normed, dense, normed, head]


def normal(seed: Any, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 2


def parts() -> tuple[list[Any], list[Any]]:
    params = [
        {"kernel": normal(at, 6, 6), "mean": np.ones(6, np.float32)} if at % 2 == 0 else normal(at, 6, 6)
        for at in range(3)
    ]
    of_normed = {"mean": np.zeros(6, np.float32), "seen": np.int32(0)}
    return [*params, normal(9, 6, 2)], [of_normed, None, of_normed, {"loss": np.float32(0)}]


def micro_batch(step: int, micro: int, place: int) -> Any:
    return normal([step, micro, place], 4, 6), normal([step, micro, place, 1], 4, 2)


def clipped_muon() -> Any:
    return optax.chain(optax.clip_by_global_norm(0.1), optax.contrib.muon(0.02))


def plateau() -> Any:
    return optax.chain(optax.adafactor(0.02), optax.contrib.reduce_on_plateau(factor=0.5, patience=0))


def clipped_adam() -> Any:
    return optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.02)), 2)


def loss_of(params: Any, state: Any, batch: Any) -> Any:
    """The layers one after another, in plain JAX."""
    value, after = batch[0], list(state)
    key = jax.random.key(0)
    value, after[0] = normed(params[0], state[0], value, key)
    value = dense(params[1], value, key)
    value, after[2] = normed(params[2], state[2], value, key)
    loss, (after[3], _) = head(params[3], state[3], (value, batch[1]), key)
    return loss, after


@cache
def plainly(recipe: Any, data: int) -> tuple[list[float], Any, Any]:
    transformation = recipe()
    params, state = parts()
    params = jax.tree.map(jnp.asarray, params)
    slots, losses = transformation.init(params), []
    gradient = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    for step in range(STEPS):
        found, states = [], []
        for place in range(data):
            own = state
            for micro in range(MICRO_BATCHES):
                (loss, own), one = gradient(params, own, micro_batch(step, micro, place))
                found.append((loss, one))
            states.append(own)
        mean = jax.tree.map(lambda *each: sum(each) / len(each), *(one for _, one in found))
        loss = jnp.stack([loss for loss, _ in found]).mean()
        updates, slots = transformation.update(mean, slots, params, value=loss)
        params = optax.apply_updates(params, updates)
        state = jax.tree.map(
            lambda *each: each[0] if jnp.result_type(each[0]) == jnp.int32 else sum(each) / len(each), *states
        )
        losses.append(float(loss))
    return losses, params, state


def config_of(stages: int, stage: int, schedule: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 60},
        "pipeline": {"stages": stages, "schedule": schedule, "partition": "uniform"} if stages > 1 else {},
    }


def trained(
    ranks: Any, recipe: Any, stages: int, stage: int, schedule: str, steps: range = range(STEPS), folder: Any = None
) -> Any:
    data, (params, state) = ranks.world_size // stages, parts()
    place = ranks.rank % data
    config = config_of(stages, stage, schedule)
    engine = polyaccel.initialize(model=LAYERS, params=params, state=state, optimizer=recipe(), config=config)
    if steps[0]:
        engine.load_checkpoint(str(folder))
    losses = [
        float(engine.train_batch(iter([micro_batch(step, micro, place) for micro in range(MICRO_BATCHES)])))
        for step in steps
    ]
    engine.eval_batch(
        iter([micro_batch(9, micro, place) for micro in range(MICRO_BATCHES)][: None if stages > 1 else 1])
    )
    if folder is not None:
        engine.save_checkpoint(str(folder))
    found = losses, jax.tree.map(np.array, engine.params), jax.tree.map(np.array, engine.state)
    engine.destroy()
    return found


def assert_as_plain(found: list[Any], recipe: Any, data: int, steps: range = range(STEPS)) -> None:
    losses, *wanted = plainly(recipe, data)
    means = np.mean([found[rank][0] for rank in range(data)], axis=0)
    np.testing.assert_allclose(means, [losses[step] for step in steps], rtol=2e-6)
    seen = set[tuple[int, int]]()
    for _, *trees in found:
        for kind, (tree, whole) in enumerate(zip(trees, wanted, strict=True)):
            for at, (one, other) in enumerate(zip(tree, whole, strict=True)):
                if one is not None:
                    seen.add((kind, at))
                    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), one, other)
    assert seen == {(0, at) for at in range(4)} | {(1, at) for at in (0, 2, 3)}


@pytest.mark.parametrize(
    ("recipe", "stages", "data", "stage", "schedule"),
    [
        (clipped_muon, 2, 2, 1, "1f1b"),
        (plateau, 2, 1, 0, "gpipe"),
        (plateau, 2, 2, 0, "zb-h1"),
        (clipped_adam, 4, 1, 2, "1f1b"),
        (clipped_adam, 2, 2, 2, "zb-v"),
        (clipped_muon, 1, 2, 1, "1f1b"),
    ],
)
def test_stages_train_as_plain_jax(recipe: Any, stages: int, data: int, stage: int, schedule: str) -> None:
    found = run_threads(stages * data, trained, recipe, stages, stage, schedule)
    assert_as_plain(found, recipe, data)


@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 2)), ((2, 0), (4, 1)), ((1, 0), (2, 2))])
def test_a_checkpoint_continues_on_other_stages(before: Any, after: Any, tmp_path: Any) -> None:
    run_threads(before[0], trained, clipped_muon, before[0], before[1], "1f1b", range(2), tmp_path)
    found = run_threads(after[0], trained, clipped_muon, after[0], after[1], "1f1b", range(2, STEPS), tmp_path)
    assert_as_plain(found, clipped_muon, 1, range(2, STEPS))


@pytest.mark.parametrize(("state", "value"), [([None] * 3, 3), ({"mean": np.zeros(6)}, "dict")])
def test_a_state_that_does_not_fit_is_refused(state: Any, value: Any) -> None:
    def run(ranks: Any) -> None:
        engine = polyaccel.initialize(
            model=LAYERS, params=parts()[0], state=state, optimizer=optax.sgd(0.1), config=config_of(2, 1, "1f1b")
        )
        engine.train_batch(iter([micro_batch(0, micro, 0) for micro in range(MICRO_BATCHES)]))

    with pytest.raises(PolyaccelError) as error:
        run_threads(2, run)
    assert error.value.value == value
