"""Proofs at the first step of functions of JAX: right ones are proven once and leave no trace, wrong rewrites stop."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from jax_models import leaves
from proof_verdicts import pass_on_verdicts, prove_as_users_do

import polyaccel
from polyaccel.errors import VerificationError
from polyaccel.jax import unit
from polyaccel.jax.carried_state import ViewsState
from polyaccel.jax.optax_on_owners import OptaxOnOwners
from polyaccel.jax.optax_optimizer import OptaxOptimizer
from polyaccel.jax.verify import first_step
from polyaccel.jax.verify.first_step import FirstStepProof
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.verify.prove import threads_run
from polyaccel.verify.variant import Variant

WIDTH = 4


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    prove_as_users_do(monkeypatch, tmp_path)


@pytest.fixture
def verdicts(monkeypatch):
    """The proofs of all ranks, and the reasons for what was not proven."""
    found = []
    pass_on_verdicts(monkeypatch, FirstStepProof, found.append)
    return found


def block(layer, hidden):
    return jnp.tanh(hidden @ layer["kernel"])


def in_units(params, batch, rng):
    for layer in params:
        batch = unit(block)(layer, batch)
    return jnp.square(batch).mean()


def lookups(params, batch, rng):
    """A table among the samples, as long as the batch by chance."""
    return (batch["table"][batch["at"]] * jnp.square(batch["x"] @ params[0]["kernel"]).mean(axis=-1)).mean()


def random(step, rank, samples=4):
    return np.random.default_rng([step, rank]).standard_normal((samples, WIDTH)).astype(np.float32)


def params_of(count=2):
    return [{"kernel": random(layer, 9)} for layer in range(count)]


def train(world=1, fn=in_units, *, client=None, batch=random, steps=2, **config):
    """(losses, parameters) of each rank."""

    def program(communicator):
        own = {"train_micro_batch_size_per_gpu": 4, "verify": "auto", **config}
        engine = polyaccel.initialize(model=fn, params=params_of(), optimizer=client, config=own)
        size = 4 * engine.gradient_accumulation_steps()
        losses = [float(engine.train_batch(batch(step, communicator.rank, size))) for step in range(steps)]
        found = losses, leaves(engine.params)
        engine.destroy()
        return found

    return run_threads(world, program)


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "gradient_clipping": 0.1}
RECOMPUTED = {"activation_checkpointing": {"enabled": True}}


@pytest.mark.parametrize(
    ("world", "names", "config"),
    [
        (1, {"activation_checkpointing", "zero_optimization"}, {"zero_optimization": {"stage": 3}, **RECOMPUTED}),
        (2, {"optax", "gradient_accumulation_steps"}, {"gradient_accumulation_steps": 2}),
    ],
)
def test_a_right_training_is_proven_once_and_has_no_trace(verdicts, world, names, config):
    config = {"zero_optimization": {"stage": 2}, **config}
    own = {} if world == 2 else ADAMW
    run = {"client": optax.adamw(1e-2, mask=lambda params: jax.tree.map(lambda one: one.ndim > 1, params))}
    run = run if world == 2 else {}
    wanted = train(world, **run, **own, **config, verify="off")
    assert not verdicts
    found = train(world, **run, **own, **config)
    assert len(verdicts) == world
    assert all(proof.is_proven for proof in verdicts)
    assert names <= verdicts[0].acted.keys()
    again = train(world, **run, **own, **config)
    assert len(verdicts) == world
    for losses, params in (*found, *again):
        assert losses == wanted[0][0] or losses == wanted[-1][0]
        for fqn, value in wanted[0][1].items():
            np.testing.assert_array_equal(params[fqn], value)


def centred(params, state, batch, rng):
    hidden = batch @ params[0]["kernel"]
    new = {"mean": 0.5 * state["mean"] + 0.5 * hidden.mean(0), "count": state["count"] + 1}
    return jnp.square(jnp.tanh(hidden - state["mean"])).mean(), new


def test_a_state_is_proven_with_its_averages_over_ranks(verdicts, monkeypatch):
    def go(ranks):
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "verify": "auto", **ADAMW}
        state = {"mean": jnp.zeros(WIDTH), "count": 0}
        engine = polyaccel.initialize(model=centred, params=params_of(), state=state, config=config)
        engine.train_batch(random(0, ranks.rank, 8))
        return int(engine.state["count"])

    assert run_threads(2, go) == [2, 2]
    assert all(proof.is_proven for proof in verdicts)
    verdicts.clear()
    monkeypatch.setattr(ViewsState, "reduce", lambda self: None)
    monkeypatch.setattr(first_step, "is_proven", lambda digest: False)
    run_threads(2, go)
    kinds = {(finding.kind, finding.name) for finding in verdicts[0].findings}
    assert ("state", "carried mean") in kinds


def test_an_update_by_owners_is_proven_and_a_wrong_one_is_not(verdicts, monkeypatch):
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.contrib.reduce_on_plateau(), optax.sgd(0.1))
    train(2, client=clipped, zero_optimization={"stage": 2})
    assert verdicts[0].is_proven
    assert "optax" in verdicts[0].acted
    right = OptaxOnOwners._moved
    monkeypatch.setattr(
        OptaxOnOwners, "_moved", lambda self, grads, state, params, scale, loss:
        right(self, grads, state, params, 2 * scale, loss))  # fmt: skip
    with pytest.raises(VerificationError):
        train(2, client=optax.chain(optax.centralize(), optax.sgd(0.1)), zero_optimization={"stage": 2})


def test_nothing_is_proven_where_nothing_is_rewritten(verdicts):
    train(**ADAMW, zero_optimization={"stage": 2})
    assert not verdicts
    train(**ADAMW, zero_optimization={"stage": 2}, verify="always")
    assert verdicts[0].is_proven


def test_a_wrong_update_on_slices_ends_the_training(monkeypatch):
    right = OptaxOptimizer.step
    monkeypatch.setattr(
        OptaxOptimizer,
        "step",
        lambda self, program, weights, gradient, *rest: right(self, program, weights, 2 * gradient, *rest),
    )
    with pytest.raises(VerificationError) as caught:
        train(client=optax.sgd(0.1))
    assert caught.value.value == "0.kernel"
    assert "optax" in caught.value.message


def test_a_table_that_accumulation_cuts_ends_the_training():
    def batch(step, rank, samples):
        at = np.arange(samples)[::-1].copy()
        return {"x": random(step, rank, samples), "table": np.linspace(1, 9, samples, dtype=np.float32), "at": at}

    with pytest.raises(VerificationError) as caught:
        train(fn=lookups, batch=batch, **ADAMW, gradient_accumulation_steps=2)
    assert "gradient_accumulation_steps" in caught.value.message


def test_what_does_not_run_alone_is_said_and_trains(verdicts):
    calls = []

    def fails_later(params, batch, rng):
        calls.append(batch)
        if len(calls) > 1:
            raise ValueError("once only")
        return in_units(params, batch, rng)

    def program(communicator):
        config = {"train_micro_batch_size_per_gpu": 4, "verify": "always", **ADAMW}
        engine = polyaccel.initialize(model=fails_later, params=params_of(), config=config)
        with pytest.raises(ValueError) as caught:
            engine.train_batch(random(0, 0))
        assert caught.value.args == ("once only",)
        engine.destroy()

    run_threads(1, program)
    assert len(verdicts) == 1
    assert isinstance(verdicts[0], str)


@pytest.mark.parametrize(("activation", "has_choices"), [(jax.nn.relu, True), (jnp.tanh, False)])
def test_runs_with_noise_record_whether_a_function_chooses(activation, has_choices):
    def fn(params, batch, rng):
        return jnp.square(activation(batch @ params[0]["kernel"])).mean()

    def program():
        engine = polyaccel.initialize(
            model=fn, params=params_of(), config={"train_micro_batch_size_per_gpu": 4, **ADAMW}
        )
        engine.train_batch(random(0, 0))
        raise AssertionError("the program ran on after its last step")

    run = threads_run(1, program)
    plain, noisy, again = (run(Variant("plain", True, noise=noise, steps=1))[0] for noise in (0, 1, 1))
    assert (plain.has_choices, noisy.has_choices) == (False, has_choices)
    assert noisy.values["0/loss/"] != plain.values["0/loss/"]
    assert noisy.values["0/loss/"] == again.values["0/loss/"] == pytest.approx(plain.values["0/loss/"], rel=1e-5)
