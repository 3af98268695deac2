"""One process with several devices: batches that devices share in native mode, users' own meshes, idle devices."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import polyaccel
from polyaccel.errors import ConfigError, PolyaccelError
from polyaccel.jax import replicated
from polyaccel.testkit.ranks.procs import RankPool

pytestmark = pytest.mark.timeout(300)
PATIENCE_S = 240.0
ROWS = 8
X = np.random.default_rng(0).standard_normal((ROWS, 5)).astype(np.float32)
CONFIG = {"train_batch_size": ROWS, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
MODES = ["views", "native"]


@pytest.fixture(scope="module")
def here():
    """`here(function, *arguments)` in a process with two devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    with RankPool(1, comm_timeout_s=PATIENCE_S, environ={"XLA_FLAGS": flags}) as pool:
        yield lambda function, *arguments: pool.run(run, function, arguments, timeout_s=PATIENCE_S)[0]


def run(communicator, function, arguments):
    assert len(jax.devices()) == 2
    return function(*arguments)


def start(fn, mode, params=None, **changes):
    params = {"w": np.full((5, 4), 0.1, np.float32)} if params is None else params
    with jax.default_device(jax.devices()[0] if mode == "views" else None):  # the one that views mode uses
        return polyaccel.initialize(model=fn, params=params, config={**CONFIG, "jax": {"execution": mode}, **changes})


def refused(function, *arguments):
    """What a PolyaccelError of the call is about."""
    with pytest.raises(PolyaccelError) as caught:
        function(*arguments)
    assert caught.value.hint
    return caught.value.value


def error(p, batch, rng):
    return jnp.mean((batch @ p["w"]) ** 2)


# Batches in native mode.


def weighted(p, batch, rng):
    return jnp.mean(batch["cw"][batch["y"]] * jnp.sum((batch["x"] @ p["w"]) ** 2, -1))


def distilled(p, batch, rng):
    return jnp.mean((batch["x"] @ p["w"] - jnp.tanh(batch["x"] @ batch["teacher"]["w"])) ** 2)


def bootstrapped(p, batch, rng):
    target = batch["reward"] + 0.9 * jnp.max(batch["next"] @ batch["target"][0], -1)
    return jnp.mean((jnp.sum(batch["x"] @ p["w"], -1) - target) ** 2)


def noisy(p, batch, rng):
    return jnp.mean((batch["x"] @ p["w"]) ** 2) * jax.random.uniform(batch["key"])


def entries(name):
    """(loss, entries in addition to x, the one without an axis over samples)."""
    return {
        "class weights": (weighted, {"y": np.arange(ROWS) % 4, "cw": np.arange(1, 5, dtype=np.float32)}, "cw"),
        "teacher": (distilled, {"teacher": {"w": np.full((5, 4), 0.3, np.float32)}}, "teacher"),
        "target network": (
            bootstrapped,
            {"next": X[::-1].copy(), "reward": X[:, 0].copy(), "target": [np.full((5, 3), 0.2, np.float32)]},
            "target",
        ),
        "typed key": (noisy, {"key": jax.random.key(1)}, "key"),
        "raw key": (noisy, {"key": jax.random.PRNGKey(1)}, "key"),
    }[name]


def whole_entries(name, accumulation):
    fn, own, whole = entries(name)
    plain = {"x": X, **own}
    params = {"w": np.full((5, 4), 0.1, np.float32)}
    wanted, gradient = jax.value_and_grad(fn)(params, plain, None)
    changes = {"gradient_accumulation_steps": accumulation}
    refused(start(fn, "native", **changes).train_batch, plain)
    refused(start(fn, "native", **changes).eval_batch, plain)
    engine = start(fn, "native", **changes)
    marked = {**plain, whole: replicated(own[whole])}
    evaluated = float(engine.eval_batch(marked))
    found = float(engine.train_batch(marked))
    return (evaluated, found), float(wanted), np.array(engine.params["w"]), params["w"] - 0.1 * np.array(gradient["w"])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", ["class weights", "teacher", "target network", "typed key", "raw key"])
def test_devices_share_samples_alone(here, name, accumulation):
    found, wanted, params, wanted_params = here(whole_entries, name, accumulation)
    assert found == pytest.approx((wanted, wanted), rel=1e-5)
    np.testing.assert_allclose(params, wanted_params, rtol=1e-5)


def lengths_by_chance():
    """A target network as long as the batch: a part of it does not fit, and the error says what to do."""

    def fn(p, batch, rng):
        return jnp.mean((batch["x"] @ p["w"] - batch["x"] @ batch["target"]) ** 2)

    x, params = np.ones((5, 5), np.float32)[:4], {"w": np.ones((5, 4), np.float32)}
    batch = {"x": x, "target": np.ones((4, 5), np.float32).T.copy()}
    refused(start(fn, "native", params).train_batch, batch)  # lengths 4 and 5
    square = {"x": np.ones((4, 4), np.float32), "target": np.full((4, 4), 0.5, np.float32)}
    params = {"w": np.ones((4, 4), np.float32)}
    refused(start(fn, "native", params).train_batch, square)
    engine = start(fn, "native", params)
    return float(engine.train_batch({**square, "target": replicated(square["target"])}))


def test_an_array_as_long_as_the_batch_by_chance(here):
    assert here(lengths_by_chance) == pytest.approx(4.0)


# Meshes of users.


def batches_elsewhere(mode):
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    engine = start(error, mode)
    places = [
        NamedSharding(mesh, PartitionSpec("batch")),
        NamedSharding(mesh, PartitionSpec()),
        jax.sharding.SingleDeviceSharding(jax.devices()[1]),
    ]
    found = [float(engine.eval_batch(jax.device_put(X, place))) for place in places]
    found.append(float(engine.train_batch(jax.device_put(X, places[0]))))
    return found, float(error({"w": jnp.full((5, 4), 0.1)}, X, None))


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_on_any_device_has_its_values(here, mode):
    found, wanted = here(batches_elsewhere, mode)
    assert found == pytest.approx([wanted] * 4, rel=1e-5)


def meshes_in_functions(mode):
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    cut = NamedSharding(mesh, PartitionSpec("batch"))
    spread = jax.shard_map(
        lambda p, b: jax.lax.pmean(error(p, b, None), "batch"),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("batch")),
        out_specs=PartitionSpec(),
    )
    functions = [
        lambda p, b, rng: error(p, jax.lax.with_sharding_constraint(b, cut), rng),
        lambda p, b, rng: jax.jit(lambda p, b: error(p, jax.lax.with_sharding_constraint(b, cut), rng))(p, b),
        lambda p, b, rng: spread(p, b),
        lambda p, b, rng: jax.lax.pmean(error(p, b, rng), "batch"),
    ]
    return [refused(start(fn, mode).train_batch, X) is not None for fn in functions]


@pytest.mark.parametrize("mode", MODES)
def test_a_function_with_a_mesh_of_its_own_is_refused(here, mode):
    assert here(meshes_in_functions, mode) == [True] * 4


def calls_in_a_mesh(mode):
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    outside = start(error, mode)
    with jax.set_mesh(mesh):
        inside = start(error, mode)
        found = [float(inside.train_batch(X)) for _ in range(2)], inside.params
    assert found[0] == [float(outside.train_batch(X)) for _ in range(2)]
    for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(outside.params), strict=True):
        np.testing.assert_array_equal(one, other)
    return True


@pytest.mark.parametrize("mode", MODES)
def test_a_call_inside_a_mesh_does_not_take_it(here, mode):
    assert here(calls_in_a_mesh, mode)


def sharded_params():
    """In views mode; native mode takes their mesh."""
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    params = {"w": jax.device_put(np.ones((6, 4), np.float32), NamedSharding(mesh, PartitionSpec("batch")))}
    with pytest.raises(ConfigError) as caught:
        start(error, "views", params)
    return "jax.execution" in str(caught.value)


def test_parameters_on_several_devices_are_refused(here):
    assert here(sharded_params)


# Settings of JAX.


def guarded(mode):
    params = {"w": np.full((5, 4), 0.1, np.float32)}
    with jax.transfer_guard("disallow"):
        engine = start(error, mode, params, gradient_accumulation_steps=2)
        losses = [float(jax.device_get(engine.train_batch(X))) for _ in range(2)]
        losses.append(float(jax.device_get(engine.eval_batch(X))))
        engine.grad_step(X)
        engine.zero_grad()
        assert jax.tree.leaves(engine.params)
        assert engine.program(X)
    other = start(error, mode, params, gradient_accumulation_steps=2)
    return losses, [*(float(other.train_batch(X)) for _ in range(2)), float(other.eval_batch(X))]


@pytest.mark.parametrize("mode", MODES)
def test_a_transfer_guard_is_not_for_what_the_engine_moves(here, mode):
    found, wanted = here(guarded, mode)
    assert found == wanted


def idle_devices():
    """The key of the error in views mode, and the losses where one device is meant."""
    with pytest.raises(ConfigError) as caught:
        polyaccel.initialize(model=error, params={"w": np.full((5, 4), 0.1, np.float32)}, config=CONFIG)
    return caught.value.problems[0].key, float(start(error, "views").train_batch(X))


def loss_of_native():
    return float(start(error, "native").train_batch(X))


def test_devices_do_not_stay_idle(here):
    key, loss = here(idle_devices)
    assert key == "jax.execution"
    assert loss == pytest.approx(here(loss_of_native), rel=1e-6)
