"""What users of JAX type first: it works, or a PolyaccelError names the thing and says what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("equinox")
pytest.importorskip("optax")

import equinox
import jax
import jax.numpy as jnp
import optax
import torch
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax_models import leaves

import polyaccel
from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch import as_jax

ROWS = 8
X = np.random.default_rng(0).standard_normal((ROWS, 5)).astype(np.float32)
CONFIG = {"train_batch_size": ROWS, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def start(model, params=None, stage=0, **arguments):
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    if "optimizer" in arguments:
        del config["optimizer"]
    return polyaccel.initialize(model=model, params=params, config=config, **arguments)


def alone(function):
    """`function()` on the one rank there is."""
    return run_threads(1, lambda ranks: function())[0]


def refused(function):
    """The PolyaccelError of `function()`, which has a hint."""
    with pytest.raises(PolyaccelError) as caught:
        alone(function)
    assert caught.value.hint
    return caught.value


def weights():
    return {"w": np.full((5, 4), 0.1, np.float32)}


def error(p, batch, rng):
    return jnp.mean((batch @ p["w"]) ** 2)


# What a function returns.

RESULTS = {
    "three results": (lambda p, b, rng: (error(p, b, rng), {}, {}), "tuple of 3"),
    "a dict of losses": (lambda p, b, rng: {"loss": error(p, b, rng)}, "dict of 1"),
    "a dict and more": (lambda p, b, rng: ({"loss": error(p, b, rng)}, {}), "dict of 1"),
    "a list": (lambda p, b, rng: [error(p, b, rng), {}], "list of 2"),
    "nothing": (lambda p, b, rng: None, "NoneType"),
    "a text": (lambda p, b, rng: "loss", "str"),
    "a loss a sample": (lambda p, b, rng: jnp.mean(b @ p["w"], -1), (ROWS,)),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", RESULTS)
def test_results_that_are_no_loss_are_named(name, stage):
    fn, value = RESULTS[name]
    assert refused(lambda: start(fn, weights(), stage).train_batch(X)).value == value
    assert refused(lambda: start(fn, weights(), stage).eval_batch(X)).value == value


# Modules in training and in evaluation.


class Dropping(equinox.Module):
    linear: equinox.nn.Linear
    dropout: equinox.nn.Dropout

    def __init__(self):
        self.linear = equinox.nn.Linear(5, 4, key=jax.random.key(0))
        self.dropout = equinox.nn.Dropout(0.5)

    def __call__(self, x, key=None):
        return jnp.mean(self.dropout(jax.vmap(self.linear)(x), key=key) ** 2)


class Nested(equinox.Module):
    blocks: list[Any]

    def __init__(self):
        self.blocks = [Dropping(), Dropping()]

    def __call__(self, x, *, key=None, inference: bool = False):
        keys = [None, None] if key is None else jax.random.split(key)
        loss = sum(block(x, key=one) for block, one in zip(self.blocks, keys, strict=True))
        return loss * (2.0 if inference else 1.0)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", [Dropping, Nested])
def test_a_module_of_equinox_is_evaluated_in_inference_mode(kind, stage):
    named = {"inference": True} if kind is Nested else {}
    wanted = float(equinox.nn.inference_mode(kind())(X, **named))

    def go():
        engine = start(kind(), stage=stage)
        before, drawn = float(engine.eval_batch(X)), float(engine.train_batch(X))
        return before, drawn, float(engine.eval_batch(X))

    before, drawn, after = alone(go)
    assert before == pytest.approx(wanted, rel=1e-5)
    assert drawn != pytest.approx(wanted, rel=1e-3)
    assert after < before


def test_a_module_of_equinox_with_state_needs_it():
    norm = equinox.nn.BatchNorm(4, axis_name="batch", mode="batch")
    found = refused(lambda: start(norm))
    assert found.value == "BatchNorm"
    assert "make_with_state" in found.hint


class Trains(linen.Module):
    """Switched by an argument, as most examples of flax have it."""

    flag: str

    @linen.compact
    def __call__(self, x, train=None, deterministic=None):
        is_training = train if self.flag == "train" else not deterministic
        x = linen.Dropout(0.5, deterministic=not is_training)(linen.Dense(3)(x))
        return jnp.mean(x**2), jnp.float32(is_training)


class Positional(linen.Module):
    @linen.compact
    def __call__(self, x, y, is_training: bool):
        x = linen.Dropout(0.5, deterministic=not is_training)(linen.Dense(3)(x))
        return jnp.mean((x - y) ** 2), jnp.float32(is_training)


class OfNnx(nnx.Module):
    def __init__(self):
        self.linear, self.dropout = nnx.Linear(5, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x, training=False):
        return jnp.mean(self.dropout(self.linear(x), deterministic=not training) ** 2), jnp.float32(training)


def flagged(name):
    """(arguments of initialize, a batch, its loss in evaluation)."""
    if name == "nnx":
        return {"model": OfNnx()}, X, OfNnx()(X)[0]
    model = Positional() if name == "positional" else Trains(name)
    batch = {"positional": (X, X[:, :3]), "train": {"x": X}, "deterministic": X}[name]
    args, named = (() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else (batch,)), {}
    named = dict(batch) if isinstance(batch, dict) else {}
    mode = {"positional": {"is_training": False}, "train": {"train": False}, "deterministic": {"deterministic": True}}
    variables = model.init(jax.random.key(0), *args, **named, **mode[name])
    return {"model": model, "params": variables}, batch, model.apply(variables, *args, **named, **mode[name])[0]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["train", "deterministic", "positional", "nnx"])
def test_a_flag_of_training_follows_the_call(name, stage):
    arguments, batch, wanted = flagged(name)

    def go():
        engine = start(**arguments, stage=stage)
        found, at = float(engine.eval_batch(batch)), float(engine.aux)
        drawn = float(engine.train_batch(batch))
        return found, at, drawn, float(engine.aux)

    found, at, drawn, then = alone(go)
    assert (at, then) == (0.0, 1.0)
    assert found == pytest.approx(float(wanted), rel=1e-5)
    assert drawn != pytest.approx(found, rel=1e-3)


def test_a_flag_in_the_batch_is_the_batchs():
    class Weighted(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            return jnp.mean(linen.Dense(3)(x) ** 2) * jnp.mean(train)

    model, batch = Weighted(), {"x": X, "train": np.full(ROWS, 3.0, np.float32)}
    variables = model.init(jax.random.key(0), **batch)
    found = alone(lambda: float(start(model, variables).train_batch(batch)))
    assert found == pytest.approx(float(model.apply(variables, **batch)), rel=1e-5)


class Parts(equinox.Module):
    linear: equinox.nn.Linear


def test_a_module_that_cannot_be_called_is_named():
    assert refused(lambda: start(Parts(equinox.nn.Linear(5, 4, key=jax.random.key(0))))).value == "Parts"


@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox"])
def test_a_batch_that_does_not_fit_a_module_is_named(kind):
    model, params = Positional(), None
    if kind == "linen":
        params = model.init(jax.random.key(0), X, X[:, :3], is_training=False)
    else:
        model = OfNnx() if kind == "nnx" else Dropping()
    assert "Positional" in str(refused(lambda: start(model, params).train_batch({"z": X}))) or kind != "linen"


# Random streams of linen.


class Noisy(linen.Module):
    """Draws from a stream that it asks for first, from one by a field, and from one that it takes for granted."""

    stream: str = "mask"

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4)(x)
        has = [self.has_rng(name) for name in ("noise", "dropout")] + [self.has_rng(self.stream)]
        drawn = [jax.random.normal(self.make_rng("noise"))] if has[0] else []
        drawn += [jax.random.normal(self.make_rng(self.stream))] if has[2] else []
        if not drawn:
            return jnp.mean(x**2), jnp.zeros(3)
        return jnp.mean((x + sum(drawn)) ** 2), jnp.stack([*drawn, jax.random.normal(self.make_rng("latent"))])


class Sampling(linen.Module):
    """As a VAE: it draws whenever it is called."""

    @linen.compact
    def __call__(self, x):
        return jnp.mean(linen.Dense(4)(x + jax.random.normal(self.make_rng("latent"), x.shape)) ** 2)


def streams(model):
    keys = jax.random.split(jax.random.key(0), 4)
    return model.init(dict(zip(("params", "noise", "mask", "latent"), keys, strict=True)), X)


@pytest.mark.parametrize("stage", [0, 3])
def test_every_stream_that_a_module_of_linen_draws_from_has_a_key(stage):
    variables = streams(Noisy())

    def go():
        engine = start(Noisy(), variables, stage)
        wanted = float(engine.eval_batch(X))
        found = []
        for _ in range(2):
            engine.train_batch(X)
            found.append(np.array(engine.aux))
        return wanted, found

    wanted, found = alone(go)
    drawn = [float(value) for one in found for value in one]
    assert len(set(drawn)) == 6
    plain = float(jnp.mean((X @ variables["params"]["Dense_0"]["kernel"]) ** 2))
    assert wanted == pytest.approx(plain, rel=1e-5)


def test_a_stream_that_an_evaluation_draws_from_is_named():
    variables = streams(Sampling())
    assert np.isfinite(alone(lambda: float(start(Sampling(), variables).train_batch(X))))
    assert refused(lambda: start(Sampling(), variables).eval_batch(X)).value == "latent"


# What is no parameter.


@dataclasses.dataclass
class OwnState:
    params: Any
    opt_state: Any


jax.tree_util.register_dataclass(OwnState, ["params", "opt_state"], [])


def of_params(get):
    return lambda p, batch, rng: error(get(p), batch, rng)


def states():
    params = jax.tree.map(jnp.asarray, weights())
    transformation = optax.adam(0.1)
    moments = transformation.init(params)
    model = nnx.Linear(5, 4, rngs=nnx.Rngs(0))
    return {
        "nnx.Optimizer": nnx.Optimizer(model, transformation, wrt=nnx.Param),
        "own state": OwnState(params, moments),
        "a dict": {"params": params, "opt_state": moments, "step": 0},
        "moments and weights": {"w": params["w"], "moments": moments},
        "one state": {"w": params["w"], "trace": {"m": optax.trace(0.9).init(params)}},
        "batch statistics": {"params": params, "batch_stats": {"mean": jnp.zeros(4)}},
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nnx.Optimizer", "Optimizer"),
        ("own state", "OwnState"),
        ("a dict", "dict"),
        ("moments and weights", "ScaleByAdamState"),
        ("one state", "TraceState"),
        ("batch statistics", "dict"),
    ],
)
def test_states_are_not_trained_as_parameters(name, kind):
    found = refused(lambda: start(of_params(lambda p: p["w"]), states()[name]))
    assert isinstance(found, ShardingError)
    assert found.value == kind


def trained_by(first, second):
    """Whether two engines end with the same parameters; each is made by a function."""

    def go(make):
        engine = make()
        engine.train_batch(X)
        return leaves(engine.params)

    one, other = (alone(lambda make=make: go(make)) for make in (first, second))
    assert [*one] == [*other]
    return all(np.array_equal(value, other[name]) for name, value in one.items())


class Statistics(TrainState):
    batch_stats: Any


def test_a_train_state_is_parameters_and_transformation():
    model = Sampling()
    variables = streams(model)
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adam(0.1))
    assert trained_by(lambda: unnamed(model, state), lambda: start(model, variables, optimizer=optax.adam(0.1)))
    own = TrainState.create(apply_fn=None, params=jax.tree.map(jnp.asarray, weights()), tx=optax.sgd(0.5))
    assert trained_by(lambda: unnamed(error, own), lambda: start(error, weights(), optimizer=optax.sgd(0.5)))
    assert trained_by(
        lambda: start(error, own, optimizer=optax.sgd(0.1)), lambda: start(error, weights(), optimizer=optax.sgd(0.1))
    )


def unnamed(model, params=None, **arguments):
    """An engine whose transformation is in what it gets."""
    return polyaccel.initialize(model=model, params=params, config={"train_batch_size": ROWS}, **arguments)


def test_further_fields_of_a_train_state_are_its_state():
    class Normalized(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            return jnp.mean(linen.BatchNorm(use_running_average=not train)(linen.Dense(3)(x)) ** 4)

    model = Normalized()
    variables = model.init(jax.random.key(0), X, train=False)
    rest = {"params": variables["params"], "batch_stats": variables["batch_stats"]}
    state = Statistics.create(apply_fn=model.apply, tx=optax.adam(0.1), **rest)

    def fn(params, state, batch, rng):
        return model.apply({"params": params, **state}, batch, train=rng is not None, mutable=["batch_stats"])

    def go(model):
        engine = unnamed(model, state)
        engine.train_batch(X)
        return float(engine.eval_batch(X)), np.asarray(engine.state["batch_stats"]["BatchNorm_0"]["mean"])

    (found, mean), (wanted, other) = alone(lambda: go(model)), alone(lambda: go(fn))
    assert found == wanted
    np.testing.assert_array_equal(mean, other)
    assert np.abs(mean).max() > 0.0


TAKEN = {
    "adamw": lambda: optax.adamw(optax.linear_schedule(0.1, 0.0, 9), mu_dtype=jnp.bfloat16),
    "momentum": lambda: optax.masked(optax.sgd(0.1, 0.9), {"w": True}),
    "whole": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adafactor(0.02)),
    "slow": lambda: optax.contrib.schedule_free_sgd(0.1),
}


@pytest.mark.parametrize(
    ("name", "stage", "mode"),
    [
        ("adamw", 3, "views"),
        ("momentum", 1, "native"),
        ("whole", 0, "views"),
        ("whole", 3, "native"),
        ("slow", 2, "views"),
    ],
)
def test_a_train_state_that_has_taken_steps_continues(name, stage, mode):
    state = TrainState.create(apply_fn=None, params=jax.tree.map(jnp.asarray, weights()), tx=TAKEN[name]())

    @jax.jit
    def step(state):
        loss, gradients = jax.value_and_grad(lambda params: error(params, X, None))(state.params)
        return state.apply_gradients(grads=gradients), loss

    for _ in range(3):
        state, _ = step(state)

    def go():
        more = {"zero_optimization": {"stage": stage}, "jax": {"execution": mode}, "train_batch_size": ROWS}
        engine = polyaccel.initialize(model=error, params=state, config=more)
        assert engine.global_steps == 3
        losses = [float(engine.train_batch(X)) for _ in range(3)]
        return losses, jax.tree.map(np.asarray, engine.params), engine.global_steps

    losses, params, steps = alone(go)
    assert steps == 6
    for found in losses:
        state, loss = step(state)
        assert found == pytest.approx(float(loss), rel=1e-6)
    jax.tree.map(lambda own, plain: np.testing.assert_allclose(own, plain, rtol=0, atol=1e-6), params, state.params)


def test_an_optimizer_of_nnx_that_has_taken_steps_continues():
    class Still(OfNnx):
        def __call__(self, x):
            return jnp.mean(self.linear(x) ** 2)

    def begun():
        both = nnx.ModelAndOptimizer(Still(), optax.adam(0.1), wrt=nnx.Param)
        for _ in range(2):
            both.update(nnx.grad(lambda model: model(X))(both.model))
        return both

    plain = begun()
    plain.update(nnx.grad(lambda model: model(X))(plain.model))

    def go():
        engine = unnamed(begun())
        engine.train_batch(X)
        return jax.tree.leaves(engine.params), engine.global_steps

    leaves, steps = alone(go)
    assert steps == 3
    for own, other in zip(leaves, jax.tree.leaves(nnx.state(plain.model, nnx.Param)), strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-6)


def test_a_training_state_does_not_continue_with_another_transformation():
    params = jax.tree.map(jnp.asarray, weights())
    fresh = TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))
    moved = fresh.apply_gradients(grads=params)
    assert refused(lambda: unnamed(error, moved, optimizer=optax.sgd(0.1))).value == 1
    without = (moved.opt_state[0]._replace(mu={}), *moved.opt_state[1:])
    assert refused(lambda: unnamed(error, moved.replace(opt_state=without))).value == 1


def test_an_optimizer_of_nnx_is_module_and_transformation():
    both = nnx.ModelAndOptimizer(OfNnx(), optax.adam(0.1), wrt=nnx.Param)
    assert trained_by(lambda: unnamed(both), lambda: start(OfNnx(), optimizer=optax.adam(0.1)))
    model = OfNnx()
    apart = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    assert trained_by(lambda: unnamed(model, optimizer=apart), lambda: start(OfNnx(), optimizer=optax.adam(0.1)))
    some = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.LoRAParam)
    assert refused(lambda: unnamed(model, optimizer=some)).value == str(nnx.LoRAParam)  # of which it has none


def test_an_optimizer_of_nnx_is_no_model_and_no_transformation_of_a_function():
    optimizer = states()["nnx.Optimizer"]
    assert refused(lambda: start(optimizer)).value == "Optimizer"
    assert "tx" in refused(lambda: start(error, weights(), optimizer=optimizer)).hint
    layers = [{"w": jnp.ones((5, 4))}, {"m": optax.adam(0.1).init(jnp.ones(3))}]
    assert refused(lambda: start([lambda p, v, rng: v, lambda p, v, rng: v], layers)).value == "ScaleByAdamState"


@pytest.mark.parametrize("name", ["complex64", "uint32", "uint16", "float8_e4m3fn"])
def test_a_parameter_of_a_type_that_the_engine_lacks_is_named(name):
    found = refused(lambda: start(error, {**weights(), "odd": jnp.ones(3, name)}))
    assert isinstance(found, ShardingError)
    assert found.value == name
    assert "'odd'" in found.message


# Weights that stay as they are.


@pytest.mark.parametrize("stage", [0, 3])
def test_reference_weights_are_copies_of_the_parameters(stage):
    own = jax.tree.map(jnp.asarray, weights())

    def preferred(reference):
        return lambda p, batch, rng: jnp.mean((batch @ p["w"] - 1.0 - batch @ reference["w"]) ** 2)

    assert "jnp.copy" in refused(lambda: start(preferred(own), own, stage).train_batch(X)).hint
    reference = jax.tree.map(jnp.copy, own)

    def go():
        engine = start(preferred(reference), own, stage)
        return [float(engine.train_batch(X)) for _ in range(3)]

    found, params = [], {**own}
    for _ in range(3):
        loss, gradient = jax.value_and_grad(preferred(reference))(params, X, None)
        params = {"w": params["w"] - 0.1 * gradient["w"]}
        found.append(float(loss))
    assert alone(go) == pytest.approx(found, rel=1e-5)


# Settings of JAX.


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_tracers_do_not_outlive_their_traces(stage):
    def go():
        engine = start(Nested(), stage=stage)
        with jax.checking_leaks():
            return float(engine.train_batch(X)), float(engine.eval_batch(X))

    assert np.isfinite(alone(go)).all()


# Layers across frameworks.


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["called", "jitted"])
@pytest.mark.parametrize("differentiated", [False, True])
def test_a_layer_of_jax_inside_a_module_is_called_under_jit_first(wrap, differentiated):
    """Nothing has called it before, so its trial run happens while a program is traced."""
    layer = polyaccel.jax.as_torch(lambda p, x: jnp.tanh(x @ p["w"]), {"w": jnp.full((5, 4), 0.1)})
    fn = as_jax(torch.nn.Sequential(layer, torch.nn.Linear(4, 2)))
    params = fn.params

    def loss(p):
        return fn(p, X).sum()

    found = wrap(jax.grad(loss) if differentiated else loss)(params)
    weight, bias, w = (params[name] for name in ("1.weight", "1.bias", "0.w"))
    plain = lambda w: (jnp.tanh(X @ w) @ weight.T + bias).sum()  # noqa: E731
    if differentiated:
        np.testing.assert_allclose(found["0.w"], jax.grad(plain)(w), rtol=1e-5)
    else:
        assert float(found) == pytest.approx(float(plain(w)), rel=1e-5)


def test_names_of_the_engines_parameters_are_as_before():
    assert set(leaves(alone(lambda: start(Dropping()).params))) == {"linear.weight", "linear.bias"}
