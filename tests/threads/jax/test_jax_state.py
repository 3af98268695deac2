"""State that a function carries: running statistics, counters and keys, compared with plain loops of jit and optax."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("equinox")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax_state_models import KINDS, assert_same, batch_of, build, data, engine_of, flat, function, plain, train

import polyaccel
from polyaccel.errors import PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads

ALL = [*((kind, 2, 1) for kind in KINDS), *((kind, 3, 2) for kind in KINDS)]


@pytest.mark.parametrize(("kind", "stage", "accumulation"), ALL)
def test_training_and_evaluation_are_those_of_a_plain_loop(kind, stage, accumulation):
    assert_same(run_threads(1, train, kind, stage, accumulation)[0], plain(kind, 1, accumulation))


@pytest.mark.parametrize(("kind", "stage", "world"), [("linen", 0, 2), ("equinox", 2, 3), ("function", 2, 2)])
def test_ranks_average_their_states_at_the_boundary(kind, stage, world):
    wanted = plain(kind, world, 2)
    runs = run_threads(world, train, kind, stage, 2)
    for run in runs:
        assert_same(run, wanted, has_losses=run is runs[0])


@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox"])
def test_units_with_state_are_recomputed(kind):
    changes = {"activation_checkpointing": {"enabled": True}}
    assert_same(run_threads(1, lambda ranks: train(ranks, kind, 2, 1, **changes))[0], plain(kind))


# Values between steps.


def test_each_micro_batch_replaces_the_state_and_an_evaluation_does_not():
    def go(ranks):
        engine = engine_of("function", 2, 2)
        seen = [engine.state]
        whole = batch_of(0, ranks.rank, 2, 1)
        for at in range(2):
            engine.grad_step({name: value[4 * at : 4 * at + 4] for name, value in whole.items()})
            engine.eval_batch(data(9))
            seen.append(engine.state)
            assert engine.aux["mean"].shape == (4,)
            engine.step()
        return [*seen, engine.state]

    _, loss, params, state = build("function")
    first, *runs, last = run_threads(2, go)[0]
    assert int(first["calls"]) == 0
    whole = batch_of(0, 0, 2, 1)
    for at, found in enumerate(runs):
        batch = {name: value[4 * at : 4 * at + 4] for name, value in whole.items()}
        _, state = loss(params, state, batch, True)
        for one, other in zip(flat(found), flat(state), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(last["mean"] - runs[-1]["mean"])).max() > 1e-3  # the average of ranks


def test_a_state_that_is_assigned_has_the_form_of_the_first():
    def go(ranks):
        engine = engine_of("function", 2, 1)
        before = engine.state
        engine.train_batch(data(0))
        engine.state = before
        kept = engine.state
        wrong = [
            {"mean": before["mean"]},
            {**before, "mean": jnp.zeros(3)},
            {**before, "calls": jnp.float32(0.0)},
            {**before, "key": before["mean"]},
            None,
        ]
        for value in wrong:
            with pytest.raises(PolyaccelError):
                engine.state = value
        assert all(np.array_equal(one, other) for one, other in zip(flat(engine.state), flat(kept), strict=True))
        again = float(engine.train_batch(data(0)))
        stateless = polyaccel.initialize(model=lambda p, b, r: p["w"].sum(), params={"w": jnp.ones(2)}, config=CONFIG)
        assert stateless.state is None
        with pytest.raises(PolyaccelError):
            stateless.state = before
        return before, kept, again

    before, kept, _ = run_threads(1, go)[0]
    assert all(np.array_equal(one, other) for one, other in zip(flat(before), flat(kept), strict=True))


CONFIG = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


# What a function with state returns.

RESULTS = {
    "the loss alone": lambda loss, state: loss,
    "three results": lambda loss, state: (loss, state, {}),
    "another structure": lambda loss, state: (loss, {"mean": state["mean"]}),
    "aux first": lambda loss, state: (loss, ({}, state)),
    "another shape": lambda loss, state: (loss, {**state, "mean": jnp.zeros((2, 2))}),
    "another type": lambda loss, state: (loss, {**state, "n": jnp.float32(0.0)}),
    "no array": lambda loss, state: (loss, {**state, "n": "one"}),
}


@pytest.mark.parametrize("stage", [0, 3])
def test_results_that_hold_no_new_state_are_refused(stage):
    def go(ranks):
        for name, result in RESULTS.items():

            def fn(params, state, batch, rng, result=result):
                return result(jnp.mean(batch @ params["w"]), state)

            first = {"mean": jnp.zeros(2), "n": 0}
            config = {**CONFIG, "zero_optimization": {"stage": stage}}
            engine = polyaccel.initialize(model=fn, params={"w": jnp.ones((3, 2))}, state=first, config=config)
            for call in (engine.grad_step, engine.eval_batch):
                with pytest.raises(PolyaccelError) as caught:
                    call(np.ones((4, 3), np.float32))
                assert caught.value.hint, name
            assert int(engine.state["n"]) == 0

    run_threads(1, go)


ARGUMENTS = {
    "a state and three arguments": {"model": lambda p, b, r: 0.0, "params": {"w": jnp.ones(2)}, "state": {}},
    "four arguments and no state": {"model": lambda p, s, b, r: (0.0, s), "params": {"w": jnp.ones(2)}},
    "no array": {"model": function, "params": {"w": jnp.ones(2)}, "state": {"name": "x"}},
    "an unknown reduction": {
        "model": function,
        "params": {"w": jnp.ones(2)},
        "state": {"mean": jnp.ones(2)},
        "state_reduction": "sum",
    },
    "layers of a pipeline": {"model": [function, function], "params": [{"w": jnp.ones(2)}] * 2, "state": {"n": 0}},
    "an nnx module with another": {"model": nnx.BatchNorm(3, rngs=nnx.Rngs(0)), "state": {"mean": jnp.ones(3)}},
    "linen with one collection's values": {"model": linen.Dense(2), "params": {"kernel": jnp.ones((3, 2))}, "state": 1},
    "linen with two states": {
        "model": linen.Dense(2),
        "params": {"params": {"kernel": jnp.ones((3, 2))}, "cache": {"n": jnp.ones(2)}},
        "state": {"cache": {"n": jnp.ones(2)}},
    },
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_do_not_fit_together_are_refused(name):
    with pytest.raises(PolyaccelError) as caught:
        run_threads(1, lambda ranks: polyaccel.initialize(**ARGUMENTS[name], config=CONFIG))
    assert caught.value.hint


# Ranks that differ, and checkpoints.


def counting(params, state, batch, rng):
    """A sum of samples, and a count that differs from rank to rank."""
    new = {"sum": state["sum"] + batch.sum(0), "seen": state["seen"] + (batch[0, 0] > 0), "bits": state["bits"] + 1}
    return jnp.square(batch @ params["w"]).mean(), new


def counter(rank, reduction):
    first = {"sum": jnp.zeros(3), "seen": np.int32(0), "bits": jnp.zeros(2, jnp.uint32)}
    engine = polyaccel.initialize(
        model=counting, params={"w": jnp.ones((3, 2))}, state=first, state_reduction=reduction, config=CONFIG
    )
    return engine, np.full((4, 3), 2.0 * rank - 1.0, np.float32)


def test_counts_that_differ_between_ranks_have_no_mean():
    def go(ranks):
        engine, batch = counter(ranks.rank, "mean")
        with pytest.raises(PolyaccelError) as caught:
            engine.train_batch(batch)
        return caught.value.value

    assert run_threads(2, go) == ["seen", "seen"]


def test_a_state_per_rank_is_saved_whole_and_loaded_by_any_number_of_ranks(tmp_path):
    def per_rank(name):
        return "none" if name == "seen" else "mean"

    def save(ranks):
        engine, batch = counter(ranks.rank, per_rank)
        engine.train_batch(batch)
        engine.save_checkpoint(str(tmp_path))
        return flat(engine.state)

    def load(ranks):
        engine, _ = counter(ranks.rank, per_rank)
        engine.load_checkpoint(str(tmp_path))
        return flat(engine.state)

    saved = run_threads(2, save)
    assert [int(seen) for _, seen, _ in saved] == [0, 1]
    assert [values[0].tolist() for values in saved] == [[1, 1]] * 2
    np.testing.assert_array_equal(saved[0][2], np.zeros(3))
    for world in (1, 3):
        for rank, found in enumerate(run_threads(world, load)):
            for one, other in zip(found, saved[rank % 2], strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)


def test_a_checkpoint_with_state_continues_as_if_never_stopped(tmp_path):
    def go(ranks):
        engine = engine_of("equinox", 2, 1)
        engine.train_batch(data(0, ranks.rank))
        engine.save_checkpoint(str(tmp_path))
        engine.train_batch(data(1, ranks.rank))
        wanted = float(engine.eval_batch(data(9))), flat(engine.state)
        engine = engine_of("equinox", 2, 1)
        engine.load_checkpoint(str(tmp_path))
        engine.train_batch(data(1, ranks.rank))
        return wanted, (float(engine.eval_batch(data(9))), flat(engine.state))

    (loss, state), (again, other) = run_threads(2, go)[0]
    assert loss == again
    for one, two in zip(state, other, strict=True):
        np.testing.assert_array_equal(one, two)


# Random streams and flags.


class Dropping(linen.Module):
    """Dropout and another stream with statistics, by an argument that is not called train."""

    @linen.compact
    def __call__(self, x, deterministic):
        x = linen.BatchNorm(use_running_average=deterministic)(linen.Dense(4)(x))
        x = linen.Dropout(0.5, deterministic=deterministic)(x)
        noise = jax.random.normal(self.make_rng("noise"), (3,)) if self.has_rng("noise") else jnp.zeros(3)
        return jnp.mean(jnp.square(x - 1.0)), {"noise": noise, "deterministic": jnp.float32(deterministic)}


def test_streams_flags_and_auxiliary_outputs_are_as_without_state():
    model, x = Dropping(), data(0)["x"]
    keys = dict(zip(("params", "dropout", "noise"), jax.random.split(jax.random.key(0), 3), strict=True))
    variables = model.init(keys, x, deterministic=True)

    def go(ranks):
        engine = polyaccel.initialize(model=model, params=variables, config=CONFIG)
        seen = []
        for _ in range(2):
            engine.train_batch(x)
            seen.append(engine.aux)
        return seen, float(engine.eval_batch(x)), engine.aux, engine.params, engine.state

    seen, evaluated, aux, params, state = run_threads(1, go)[0]
    assert [float(one["deterministic"]) for one in (*seen, aux)] == [0.0, 0.0, 1.0]
    assert len({float(value) for one in seen for value in one["noise"]}) == 6
    wanted, _ = model.apply({"params": params, **state}, x, deterministic=True)
    assert evaluated == pytest.approx(float(wanted), rel=1e-5)
    assert np.abs(np.asarray(state["batch_stats"]["BatchNorm_0"]["mean"])).max() > 0.0
