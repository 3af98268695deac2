"""What a batch may hold, and how it is cut into micro-batches, compared with the whole batch in plain JAX."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import torch

import polyaccel
from polyaccel.errors import PolyaccelError
from polyaccel.jax import replicated, unit
from polyaccel.testkit.ranks.threads import run_threads

ROWS = 8
X = np.random.default_rng(0).standard_normal((ROWS, 5)).astype(np.float32)
LABELS = np.arange(ROWS, dtype=np.int32) % 4
WEIGHTS = np.array([1.0, 2.0, 3.0, 4.0], np.float32)


def params():
    return {"w": np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)}


def weighted(p, batch, rng):
    return jnp.mean(batch["weights"][batch["y"]] * jnp.sum(jnp.tanh(batch["x"] @ p["w"]) ** 2, -1))


def distilled(p, batch, rng):
    return jnp.mean((batch["x"] @ p["w"] - batch["x"] @ batch["target"]["w"] - batch["target"]["b"]) ** 2)


def noisy(p, batch, rng):
    return jnp.mean((batch["x"] @ p["w"]) ** 2) * jax.random.uniform(batch["key"])


def scaled(p, batch, rng):
    return jnp.mean((batch["x"] @ p["w"]) ** 2) * batch["beta"]


TARGET = {"w": np.full((5, 4), 0.25, np.float32), "b": np.full(4, 0.5, np.float32)}
WHOLE = {
    "class weights": (weighted, {"y": LABELS, "weights": WEIGHTS}, "weights"),
    "a target network": (distilled, {"target": TARGET}, "target"),
    "a key": (noisy, {"key": jax.random.key(3)}, "key"),
    "a key of 32 bits": (noisy, {"key": jax.random.PRNGKey(3)}, "key"),
}
"""Loss, entries in addition to x, and which of them has no axis over samples."""


def train(fn, batch, steps, accumulation, start=None, **config):
    """(loss, parameters) after a step."""
    settings = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **config,
    }

    def go(ranks):
        engine = polyaccel.initialize(model=fn, params=start or params(), config=settings)
        losses = [float(engine.train_batch(batch)) for _ in range(steps)]
        return losses, jax.tree.map(np.array, engine.params)

    return run_threads(1, go)[0]


def plain(fn, batch, steps):
    found, losses = jax.tree.map(jnp.asarray, params()), []
    for _ in range(steps):
        loss, gradients = jax.value_and_grad(fn)(found, batch, None)
        found = jax.tree.map(lambda value, gradient: value - 0.1 * gradient, found, gradients)
        losses.append(float(loss))
    return losses, found


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", WHOLE)
def test_what_is_declared_replicated_is_whole_in_every_micro_batch(name, stage):
    fn, entries, whole = WHOLE[name]
    marked = {"x": X, **entries, whole: replicated(entries[whole])}
    losses, found = train(fn, marked, 2, accumulation=4, zero_optimization={"stage": stage})
    wanted, wanted_params = plain(fn, {"x": X, **entries}, 2)
    assert losses == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(found["w"], wanted_params["w"], rtol=1e-5)


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_declared_is_refused_and_not_cut(name):
    fn, entries, _ = WHOLE[name]
    batch = {"x": X, **entries}
    with pytest.raises(PolyaccelError) as caught:
        train(fn, batch, 1, accumulation=4)
    assert "replicated" in caught.value.hint
    losses, _ = train(fn, batch, 1, accumulation=1)  # nothing is cut
    assert losses == pytest.approx(plain(fn, batch, 1)[0], rel=1e-5)


def test_numbers_are_whole():
    losses, _ = train(scaled, {"x": X, "beta": 0.5}, 1, accumulation=2)
    assert losses == pytest.approx(plain(scaled, {"x": X, "beta": 0.5}, 1)[0], rel=1e-5)


def test_a_key_of_32_bits_is_no_pair_of_samples():
    """Its length is that of the batch by chance."""
    with pytest.raises(PolyaccelError) as caught:
        train(noisy, {"x": X[:2], "key": jax.random.PRNGKey(0)}, 1, accumulation=2, train_batch_size=2)
    assert caught.value.value == "batch['key']"


def test_an_array_that_is_as_long_as_the_batch_by_chance_is_named_where_a_part_does_not_fit():
    batch = {"x": X, "target": {"w": np.ones((ROWS, 4), np.float32)}}

    def fn(p, batch, rng):
        return jnp.mean((batch["x"] @ p["w"] @ batch["target"]["w"].T) ** 2 * jnp.ones((1, ROWS)))

    with pytest.raises(PolyaccelError) as caught:
        train(fn, batch, 1, accumulation=2)
    assert "replicated" in caught.value.hint
    marked = {**batch, "target": replicated(batch["target"])}
    assert train(fn, marked, 1, accumulation=2)[0] == pytest.approx(plain(fn, batch, 1)[0], rel=1e-5)


def test_labels_of_layers_may_be_replicated():
    def first(p, value, rng):
        return jnp.tanh(value @ p["w"])

    def last(p, value, rng):
        hidden, labels = value
        return jnp.mean(labels["weights"][labels["y"]] * jnp.sum((hidden * p) ** 2, -1))

    start = [params(), np.ones(4, np.float32)]
    labels = {"y": LABELS, "weights": replicated(WEIGHTS)}
    losses, _ = train([first, last], (X, labels), 1, accumulation=2, start=start)
    wanted = plain(weighted, {"x": X, "y": LABELS, "weights": WEIGHTS}, 1)[0]
    assert losses == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(PolyaccelError):
        train([first, last], (X, {**labels, "weights": WEIGHTS}), 1, accumulation=2, start=start)


def test_labels_behind_a_stage_may_be_replicated():
    def first(p, value, rng):
        return jnp.tanh(value @ p["w"])

    def last(p, value, rng):
        hidden, labels = value
        return jnp.mean(labels["weights"][labels["y"]] * jnp.sum((hidden * p) ** 2, -1))

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": {"stages": 2},
    }
    labels = {"y": LABELS, "weights": replicated(WEIGHTS)}

    def go(ranks):
        engine = polyaccel.initialize(model=[first, last], params=[params(), np.ones(4, np.float32)], config=config)
        with pytest.raises(PolyaccelError):
            engine.train_batch((X, {**labels, "weights": WEIGHTS}))
        found = [float(engine.eval_batch((X, labels))), *(float(engine.train_batch((X, labels))) for _ in range(2))]
        engine.destroy()
        return found

    def whole(p, batch, rng):
        return last(p[1], (first(p[0], batch["x"], rng), batch), rng)

    start, batch = [params(), jnp.ones(4)], {"x": X, "y": LABELS, "weights": WEIGHTS}
    wanted, gradients = jax.value_and_grad(whole)(start, batch, None)
    after = jax.tree.map(lambda value, gradient: value - 0.1 * gradient, start, gradients)
    expected = [float(wanted), float(wanted), float(whole(after, batch, None))]
    for found in run_threads(2, go):
        assert found == pytest.approx(expected, rel=1e-5)


TENSORS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int64": torch.int64,
    "bool": torch.bool,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_torch_of_every_type(name):
    values = torch.tensor([[1.0, 0.0, 2.0], [0.5, 3.0, 0.0]]).to(TENSORS[name])

    def fn(p, batch, rng):
        return jnp.sum(batch.astype(jnp.float32) * p["w"])

    losses, _ = train(fn, values.T, 1, accumulation=1, start={"w": np.ones((3, 2), np.float32)})
    assert losses == [float(values.float().sum())]


def test_a_tensor_that_wants_gradients_and_one_of_no_dimensions():
    batch = {"x": torch.tensor(X, requires_grad=True), "beta": torch.tensor(0.5, dtype=torch.bfloat16)}
    losses, _ = train(scaled, batch, 1, accumulation=2)
    assert losses == pytest.approx(plain(scaled, {"x": X, "beta": 0.5}, 1)[0], rel=1e-5)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("a text", "str"),
        (np.array(["a", "b"]), "ndarray"),
        (object(), "object"),
        (torch.ones(2, 2).to_sparse(), "torch.float32"),
    ],
    ids=["text", "texts", "object", "sparse"],
)
def test_what_is_no_array_is_named(entry, value):
    with pytest.raises(PolyaccelError) as caught:
        train(scaled, {"x": X, "beta": {"at": entry}}, 1, accumulation=1)
    assert caught.value.value == value
    assert "batch['beta']['at']" in str(caught.value)


LOOKUPS = {
    "class weights": lambda p, b: b["cw"][b["y"]],
    "of another type, by take": lambda p, b: jnp.take(b["cw"].astype(jnp.bfloat16), b["y"], mode="clip"),
    "in a jitted function": lambda p, b: jax.jit(lambda cw, y: cw[y])(b["cw"], b["y"]),
}
USES = {
    "samples": lambda p, b: b["cw"],
    "the first sample": lambda p, b: b["cw"][0],
    "a choice of each": lambda p, b: jnp.take_along_axis(b["x"], b["y"][:, None] % 4, axis=1)[:, 0],
    "by sample and label": lambda p, b: b["x"][jnp.arange(b["x"].shape[0]), b["y"] % 4],
}


@pytest.mark.parametrize("name", [*LOOKUPS, *USES])
def test_a_table_as_long_as_the_batch_by_chance_is_named(name, caplog):
    """It is cut, for it looks like samples; rows of it are looked up, which is what tables are for."""
    use = (LOOKUPS | USES)[name]
    batch = {"x": X, "y": np.arange(ROWS), "cw": np.arange(ROWS, dtype=np.float32)}

    def fn(p, b, rng):
        return jnp.mean(use(p, b) * jnp.sum((b["x"] @ p["w"]) ** 2, -1))

    def named():
        return [record.args for record in caplog.records if record.name == "polyaccel.jax.program.batch_checks"]

    train(fn, batch, 2, accumulation=4)
    assert named() == ([("batch['cw']", 4)] if name in LOOKUPS else [])
    caplog.clear()
    train(fn, {**batch, "cw": replicated(batch["cw"])} if name in LOOKUPS else batch, 1, accumulation=1)
    assert named() == []


@pytest.mark.parametrize("stage", [0, 3])
def test_two_engines_have_each_others_parameters_in_their_batches(stage):
    """As the two halves of a GAN: the parameters of one are constants of the other's loss."""

    def critic(p, batch, rng):
        return jnp.mean(jax.nn.softplus(batch["x"] @ batch["other"]["w"] @ p["w"].T))

    def maker(p, batch, rng):
        return jnp.mean(jax.nn.softplus(-(batch["x"] @ p["w"]) @ batch["other"]["w"].T))

    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    start = {"w": np.eye(3, 4, dtype=np.float32)}

    def go(ranks):
        one = polyaccel.initialize(model=maker, params=params(), config=config)
        other = polyaccel.initialize(model=critic, params=start, config=config)
        found = []
        for _ in range(3):
            found.append(float(other.train_batch({"x": X, "other": replicated(one.params)})))
            found.append(float(one.train_batch({"x": X, "other": replicated(other.params)})))
        return found

    wanted, one, other = [], params(), start
    for _ in range(3):
        loss, gradient = jax.value_and_grad(critic)(other, {"x": X, "other": one}, None)
        other = jax.tree.map(lambda value, by: value - 0.1 * by, other, gradient)
        wanted.append(float(loss))
        loss, gradient = jax.value_and_grad(maker)(one, {"x": X, "other": other}, None)
        one = jax.tree.map(lambda value, by: value - 0.1 * by, one, gradient)
        wanted.append(float(loss))
    assert run_threads(1, go)[0] == pytest.approx(wanted, rel=1e-5)


def types_of(fn, batch, *, start, config):
    """The types of the auxiliary output in training and in evaluation."""

    def go(ranks):
        engine = polyaccel.initialize(
            model=fn, params=start, config={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **config}
        )
        engine.train_batch(batch)
        found = [jax.tree.map(lambda value: value.dtype, engine.aux)]
        engine.eval_batch(batch)
        return [*found, jax.tree.map(lambda value: value.dtype, engine.aux)]

    return run_threads(1, go)[0]


@pytest.mark.parametrize("changes", [{}, {"jax": {"execution": "native"}}, {"zero_optimization": {"stage": 3}}])
def test_numbers_of_python_take_the_type_of_what_they_meet(changes):
    def block(p, x, factor):
        return x @ p["w"] * factor

    def fn(p, batch, rng):
        found = unit(block)(p, batch["x"], batch["factor"])
        few = jnp.int8(1) + batch["count"], jnp.bfloat16(1) * batch["root"]
        return jnp.mean(found.astype(jnp.float32)), (found, found * batch["weights"], few, batch["strong"] * found)

    start = {"w": np.ones((5, 4)).astype(jnp.bfloat16)}
    batch = {
        "x": X.astype(jnp.bfloat16),
        "factor": 0.1,
        "count": 3,
        "root": 1.0 + 2.0j,
        "weights": jnp.full((ROWS, 1), 0.5),  # weak in plain JAX, too
        "strong": np.float32(2.0),
    }
    wanted = jax.tree.map(lambda value: value.dtype, jax.eval_shape(fn, start, batch, None)[1])
    assert wanted[0] == jnp.bfloat16
    config = {"train_batch_size": ROWS, "bf16": {"enabled": True}, **changes}
    assert types_of(fn, batch, start=start, config=config) == [wanted, wanted]


def test_numbers_of_python_are_not_rounded_to_fp16():
    """As by plain JAX, where the function computes in float32."""

    def fn(p, batch, rng):
        return jnp.sum(p["w"].astype(jnp.float32)) * batch["factor"] * 1e-6

    def go(ranks):
        config = {"train_batch_size": ROWS, "fp16": {"enabled": True, "auto_cast": True, "loss_scale": 1}}
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        engine = polyaccel.initialize(model=fn, params=params(), config=config)
        return float(engine.train_batch({"x": X, "factor": 1e6}))  # beyond fp16

    wanted = float(np.sum(params()["w"].astype(np.float16).astype(np.float64)))
    assert run_threads(1, go)[0] == pytest.approx(wanted, rel=1e-4)


def test_numbers_of_python_stay_so_over_stages():
    def first(p, value, rng):
        return {"hidden": value["x"] @ p["w"], "factor": value["factor"]}

    def last(p, value, rng):
        found = value[0]["hidden"] * value[0]["factor"] * p
        return jnp.mean(jnp.square(found).astype(jnp.float32)), found

    def go(ranks):
        config = {
            "train_batch_size": ROWS,
            "bf16": {"enabled": True},
            "pipeline": {"stages": 2},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        start = [{"w": np.ones((5, 4)).astype(jnp.bfloat16)}, np.ones(4).astype(jnp.bfloat16)]
        engine = polyaccel.initialize(model=[first, last], params=start, config=config)
        engine.train_batch(({"x": X.astype(jnp.bfloat16), "factor": 0.1}, np.zeros(ROWS, np.float32)))
        return None if engine.aux is None else engine.aux.dtype

    assert run_threads(2, go)[1] == jnp.bfloat16
