"""Gradients in the hands of a script: what the engine gives is what `jax.value_and_grad` gives of all samples."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import jax_aux
import optax
from jax_models import STAGES
from jax_surgery import CONFIG, RECIPE, ROWS, batch, check_sam, loss_fn, params, train
from pairwise import combinations

import polyaccel
from polyaccel.errors import PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads

STEPS = 2


def start(**changes):
    optimizer = {"type": "AdamW", "params": {"lr": RECIPE["learning_rate"]}}
    return polyaccel.initialize(model=loss_fn, params=params(), config={**CONFIG, "optimizer": optimizer, **changes})


@combinations(stage=list(STAGES), world=[1, 3])
def test_sam_equals_plain_jax(stage, world):
    check_sam(run_threads(world, train, stage, "sam", STEPS, {}, timeout_s=240.0), world, STEPS)


@pytest.mark.parametrize("execution", ["views", "native"])
def test_gradients_as_they_are_make_the_step_of_train_batch(execution):
    config = {"jax": {"execution": execution}}
    (own,) = run_threads(1, train, 2, "own", STEPS, config)
    (whole,) = run_threads(1, train, 2, "train_batch", STEPS, config)
    assert own[0] == whole[0]
    assert own[2:] == whole[2:]
    for name, value in whole[1].items():
        np.testing.assert_array_equal(own[1][name], value, err_msg=name)


def test_micro_batches_added_by_hand_equal_an_accumulation():
    def run(ranks, by_hand):
        engine = start(gradient_accumulation_steps=3)
        for step in range(2):
            parts = [batch(3 * step + micro, ranks.rank) for micro in range(3)]
            if not by_hand:
                engine.train_batch(iter(parts))
                continue
            found = [engine.value_and_grad(part)[1] for part in parts]
            engine.apply_gradients(jax.tree.map(lambda *each: sum(each[1:], each[0]) / jnp.float32(3), *found))
        return jax.tree.map(np.array, engine.params), engine.micro_steps, engine.get_global_grad_norm()

    for (own, micro, norm), (wanted, micros, wanted_norm) in zip(
        run_threads(2, run, True), run_threads(2, run, False), strict=True
    ):
        assert micro == micros == 6
        assert norm == pytest.approx(wanted_norm, rel=1e-5)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), own, wanted)


def test_the_loss_scale_of_fp16_is_no_concern_of_scripts():
    def run(ranks):
        scaled, plain = start(fp16={"enabled": True, "initial_scale_power": 10}), start()
        (loss, found), (_, wanted) = scaled.value_and_grad(batch(0, 0)), plain.value_and_grad(batch(0, 0))
        assert found["in"]["w"].dtype == jnp.float32
        np.testing.assert_allclose(found["in"]["w"], wanted["in"]["w"], rtol=2e-2, atol=2e-3)
        scaled.apply_gradients(found, loss)
        plain.apply_gradients(wanted)
        assert scaled.was_step_applied()
        assert scaled.get_global_grad_norm() == pytest.approx(plain.get_global_grad_norm(), rel=2e-2)
        scaled.apply_gradients(jax.tree.map(lambda one: one * jnp.nan, found))
        assert not scaled.was_step_applied()
        return True

    assert run_threads(1, run) == [True]


def test_a_key_of_the_script_is_the_key_of_the_function():
    def noisy(p, batch, rng):
        return jnp.sum(p["w"] * jax.random.normal(rng, (3,)))

    def run(ranks):
        config = {"train_batch_size": ROWS, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        engine = polyaccel.initialize(model=noisy, params={"w": np.ones(3, np.float32)}, config=config)
        key = jax.random.key(7)
        _, found = engine.value_and_grad(np.ones(ROWS), rng=key)
        np.testing.assert_array_equal(found["w"], jax.random.normal(key, (3,)))
        first, second = (engine.value_and_grad(np.ones(ROWS))[1]["w"] for _ in range(2))
        assert not np.array_equal(first, second)
        return True

    assert run_threads(1, run) == [True]


def test_a_transformation_gets_the_loss_of_the_step():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    wanted, state = [], plateau.init(0.0)
    for _ in range(3):
        scale, state = plateau.update(1.0, state, value=1.0)
        wanted.append(float(scale))
    assert wanted[-1] < wanted[0]

    def run(ranks):
        config = {**CONFIG, "gradient_clipping": 0.0, "zero_optimization": {"stage": 2}}
        engine = polyaccel.initialize(
            model=loss_fn, params=params(), optimizer=optax.chain(optax.sgd(1.0), plateau), config=config
        )
        before = np.array(engine.params["out"])
        _, gradients = engine.value_and_grad(batch(0, 0))
        raises(lambda: engine.apply_gradients(gradients))
        np.testing.assert_array_equal(engine.params["out"], before)
        moves = []
        for _ in range(3):
            before = np.array(engine.params["out"])
            engine.apply_gradients(gradients, 1.0)
            moves.append(np.array(engine.params["out"]) - before)
        for move, scale in zip(moves, wanted, strict=True):
            np.testing.assert_allclose(move, -scale * gradients["out"], rtol=1e-4, atol=1e-6)
        return True

    assert run_threads(2, run) == [True, True]


def test_a_carried_state_is_averaged_with_the_update():
    def counting(p, state, batch, rng):
        return jnp.sum(p["w"] * batch), {"mean": state["mean"] + batch.mean(), "calls": state["calls"] + 1}

    def run(ranks):
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        engine = polyaccel.initialize(
            model=counting,
            params={"w": np.ones(2, np.float32)},
            state={"mean": jnp.zeros(()), "calls": jnp.zeros((), jnp.int32)},
            config=config,
        )
        loss, gradients = engine.value_and_grad(np.full(2, ranks.rank + 1.0, np.float32))
        engine.apply_gradients(gradients, loss)
        return float(engine.state["mean"]), int(engine.state["calls"])

    assert run_threads(2, run) == [(1.5, 1), (1.5, 1)]


def raises(call):
    with pytest.raises(PolyaccelError) as caught:
        call()
    assert caught.value.hint
    return caught.value


def test_what_cannot_be_applied_changes_nothing():
    def run(ranks):
        engine = start(gradient_accumulation_steps=2)
        before = jax.tree.map(np.array, engine.params)
        _, gradients = engine.value_and_grad(batch(0, 0))
        raises(lambda: engine.apply_gradients({"w": gradients["out"]}))
        cut = {**gradients, "out": gradients["out"][:2]}
        assert raises(lambda: engine.apply_gradients(cut)).value == "out"
        assert raises(lambda: engine.value_and_grad(batch(0, 0), {**before, "out": before["out"].T})).value == "out"
        engine.grad_step(batch(0, 0))
        raises(lambda: engine.apply_gradients(gradients))
        engine.zero_grad()
        engine.set_gradient_accumulation_boundary(False)
        raises(lambda: engine.apply_gradients(gradients))
        engine.set_gradient_accumulation_boundary(None)
        jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, engine.params))
        engine.apply_gradients(gradients)
        return engine.global_steps, engine.micro_steps

    assert run_threads(1, run) == [(1, 2)]


@pytest.mark.parametrize(("world", "execution"), [(1, "native"), (3, "views")])
def test_auxiliary_outputs_are_averaged(world, execution):
    jax_aux.check(run_threads(world, jax_aux.train, {"execution": execution}), world)


@pytest.mark.parametrize("what", ["key", "shape"])
def test_what_has_no_mean_is_refused(what):
    def fn(p, batch, rng):
        found = {"key": rng, "shape": jnp.zeros(batch.shape[0])}[what]
        return jnp.mean(batch @ p), found

    def run(_):
        config = {"train_batch_size": 4, "gradient_accumulation_steps": 2, "jax": {"aux": "mean"}}
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        engine = polyaccel.initialize(model=fn, params=np.ones((3, 1), np.float32), config=config)
        with pytest.raises(PolyaccelError) as caught:
            engine.train_batch(iter([np.ones((2, 3), np.float32), np.ones((3, 3), np.float32)]))
        assert "aux" in caught.value.hint

    run_threads(1, run)
