"""What could make JAX compute with other numbers than the engine has: each is safe, or a clear error."""

from __future__ import annotations

import gc
import os
from functools import partial

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import torch
from jax.experimental.layout import Format, Layout
from jax_models import make_config

import polyaccel
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.comm.default import set_thread_communicator
from polyaccel.engine.resume import WantedState
from polyaccel.errors import ConfigError, PolyaccelError, ShardingError
from polyaccel.jax.views import fence
from polyaccel.testkit.ranks.threads import run_threads

CONFIG = {key: value for key, value in make_config(2).items() if key != "scheduler"}


def weights(size=8):
    return {"w": np.full((size, size), 0.5, np.float32), "b": np.zeros(size, np.float32)}


def loss(params, batch, rng):
    return jnp.square(jnp.tanh(batch @ params["w"]) + params["b"]).mean()


def with_engine(check, *, fn=loss, params=None, config=CONFIG, memory=None, **arguments):
    """`check(engine)` on the one rank there is."""

    def go(ranks):
        engine = polyaccel.initialize(
            model=fn, params=weights() if params is None else params, config=config, **arguments
        )
        return check(engine)

    return run_threads(1, go, accelerator=CpuAccelerator(memory))[0]


def batch(size=8):
    return np.ones((2, size), np.float32)


@pytest.mark.parametrize("memory", ["torch", "numpy"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_leaf_is_a_view_and_follows_the_engine(memory, precision):
    config = CONFIG if precision == "fp32" else {**CONFIG, precision: {"enabled": True}}

    def check(engine):
        before = engine.param_views
        value = np.array(before["w"].astype(jnp.float32))
        assert str(engine.copies) == "zero-copy 2/2"
        for _ in range(2):
            engine.train_batch(batch())
        assert engine.param_views["w"] is before["w"]
        after = np.array(jnp.array(before["w"]).astype(jnp.float32))
        assert np.abs(after - value).max() > 1e-4
        _, slot = engine.zero.params.locate("w")
        flat = engine.zero.params.full(engine.zero.layout.locate("w")[0].index).view(slot.offset, slot.param.numel)
        np.testing.assert_array_equal(after.reshape(-1), np.asarray(flat.raw.tolist(), np.float32))

    with_engine(check, config=config, memory=memory)


def test_a_computation_of_the_users_own_reads_the_values_of_before():
    """XLA is still at work on the parameters when the engine wants to write them."""
    size = 256

    @jax.jit
    def slowly(x):
        return jax.lax.fori_loop(0, 40, lambda _, y: jnp.tanh(y @ x) + x, x).sum()

    def check(engine):
        engine.grad_step(np.ones((2, size), np.float32))
        kept = engine.params["w"]
        expected = float(slowly(kept))
        racing = slowly(engine.param_views["w"])
        engine.step()
        assert float(racing) == expected
        assert float(slowly(engine.params["w"])) != expected
        assert float(slowly(kept)) == expected, "params are the values of then"

    huge = {**CONFIG, "optimizer": {"type": "SGD", "params": {"lr": 1e3}}}
    params = {"w": np.eye(size, dtype=np.float32) * 0.1, "b": np.zeros(size, np.float32)}
    with_engine(check, params=params, config=huge)


def test_the_fence_waits_for_every_result_that_somebody_holds():
    slowly = jax.jit(lambda x: jax.lax.fori_loop(0, 400, lambda _, y: jnp.tanh(y @ x) + x, x).sum())
    array = jnp.eye(256)
    slowly.lower(array).compile()
    result = slowly(array)
    fence()
    assert result.is_ready()


def noted(order, name, function):
    """`function`, whose calls come into `order`."""

    def call(*args, **named):
        order.append(name)
        return function(*args, **named)

    return call


def test_the_engine_fences_before_it_writes(monkeypatch, tmp_path):
    """Whatever else makes it wait."""
    order = []

    def check(engine):
        monkeypatch.setattr("polyaccel.jax.engine.fence", noted(order, "fence", fence))
        monkeypatch.setattr(engine.zero.optimizer, "update", noted(order, "update", engine.zero.optimizer.update))
        monkeypatch.setattr(WantedState, "read", noted(order, "load", WantedState.read))
        engine.grad_step(batch())
        engine.step()
        assert order == ["fence", "update"]
        engine.save_checkpoint(str(tmp_path))
        order.clear()
        engine.load_checkpoint(str(tmp_path))
        assert order == ["fence", "load"]

    with_engine(check)


def test_a_pass_waits_for_the_devices_own_streams_on_both_sides(monkeypatch):
    """JAX must not read parameters that a stream still writes, nor have gradients back that a stream still reads."""
    order = []

    def check(engine):
        for owner, name in [
            (engine.accelerator, "synchronize"),
            (engine.adapter.views, "arrays"),
            (engine.zero.reducer, "end_backward"),
        ]:
            monkeypatch.setattr(owner, name, noted(order, name, getattr(owner, name)))
        engine.grad_step(batch())
        assert order == ["synchronize", "arrays", "end_backward", "synchronize"]
        order.clear()
        engine.eval_batch(batch())
        assert order == ["synchronize", "arrays"]
        order.clear()
        assert engine.param_views is not None
        assert order == ["synchronize", "arrays"]

    with_engine(check)


def jitted(fn):
    """What it closes over is a constant of a program within the program."""
    return lambda params, batch, rng: jax.jit(fn)(params, batch, rng)


@pytest.mark.parametrize("wrapped", [lambda fn: fn, jitted])
def test_a_closure_over_the_engines_arrays_is_refused(wrapped):
    def check(engine):
        held["w"] = engine.param_views["w"]
        for run in (engine.train_batch, engine.eval_batch):
            with pytest.raises(ShardingError) as caught:
                run(batch())
            assert caught.value.value == "w"

    held = {}
    with_engine(check, fn=wrapped(lambda params, batch, rng: loss({**params, **held}, batch, rng)))


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
@pytest.mark.parametrize("wrapped", [lambda fn: fn, jitted])
def test_a_closure_over_the_arrays_of_the_start_is_refused(wrapped, kind):
    start = {fqn: kind(value) for fqn, value in weights().items()}

    def check(engine):
        with pytest.raises(ShardingError) as caught:
            engine.train_batch(batch())
        assert caught.value.value == "b"

    fn = wrapped(lambda params, batch, rng: loss({**params, "b": start["b"]}, batch, rng))
    with_engine(check, fn=fn, params=start)


def test_other_constants_are_welcome():
    table = jnp.arange(8.0)
    with_engine(
        lambda engine: engine.train_batch(batch()),
        fn=lambda params, batch, rng: loss(params, batch + table, rng),
    )


def test_donated_and_deleted_views_come_back():
    def check(engine):
        taken = jax.jit(lambda x: x + 1.0, donate_argnums=0)(engine.param_views["w"])
        np.testing.assert_array_equal(taken, 1.5)
        engine.param_views["b"].delete()
        np.testing.assert_array_equal(engine.params["w"], 0.5)
        before = float(engine.eval_batch(batch()))
        engine.train_batch(batch())
        engine.train_batch(batch())
        assert float(engine.eval_batch(batch())) < before

    with_engine(check)


def test_donated_parameters_are_refused_at_the_start():
    params = {fqn: jnp.asarray(value) for fqn, value in weights().items()}
    jax.jit(lambda x: x + 1.0, donate_argnums=0)(params["w"]).block_until_ready()
    with pytest.raises(ShardingError) as caught:
        with_engine(None, params=params)
    assert caught.value.value == "w"


def test_parameters_that_are_not_row_major():
    values = np.arange(64, dtype=np.float32).reshape(8, 8)

    def check(engine):
        np.testing.assert_array_equal(engine.params["w"], values.T)

    with_engine(check, params={**weights(), "w": values.T})
    turned = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    array = jax.device_put(jnp.asarray(values.T), turned)
    assert array.format.layout.major_to_minor == (1, 0)
    with_engine(check, params={**weights(), "w": array})


def test_integers_of_64_bits_are_refused_and_others_are_frozen():
    with pytest.raises(ShardingError) as caught:
        with_engine(None, params={**weights(), "table": np.arange(3)})
    assert caught.value.value == "int64"
    assert all(part in str(caught.value) for part in ("'table'", "int32"))

    def check(engine):
        engine.train_batch(batch())
        np.testing.assert_array_equal(engine.params["table"], [0, 1, 2])
        assert engine.params["table"].dtype == jnp.int32

    with_engine(check, params={**weights(), "table": np.arange(3, dtype=np.int32)})


@pytest.fixture
def engine():
    """One whose process is its rank, as those that fork have."""
    set_thread_communicator(SingleCommunicator(CpuAccelerator(), timeout_s=30.0))
    try:
        engine = polyaccel.initialize(model=loss, params=weights(), config=CONFIG)
        engine.train_batch(batch())
        yield engine
    finally:
        set_thread_communicator(None)


USES = {
    "grad_step": lambda engine: engine.grad_step(batch()),
    "step": lambda engine: engine.step(),
    "train_batch": lambda engine: engine.train_batch(batch()),
    "eval_batch": lambda engine: engine.eval_batch(batch()),
    "params": lambda engine: engine.params,
    "program": lambda engine: engine.program(batch()),
    "save_checkpoint": lambda engine: engine.save_checkpoint("checkpoints"),
    "load_checkpoint": lambda engine: engine.load_checkpoint("checkpoints"),
}


def test_a_forked_process_is_told_and_the_engine_goes_on(engine, tmp_path, monkeypatch):
    """The child would wait for threads that the fork did not take along."""
    monkeypatch.chdir(tmp_path)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        gc.disable()  # what other tests left may need such threads too, to be cleared away
        try:
            for name, use in USES.items():
                try:
                    use(engine)
                except PolyaccelError as error:
                    os.write(write, f"{name}: {'forked' in str(error)}\n".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == "".join(f"{name}: True\n" for name in USES)
    os.waitpid(child, 0)
    before = float(engine.eval_batch(batch()))
    engine.train_batch(batch())
    assert float(engine.eval_batch(batch())) < before


class Rows:
    """A dataset of arrays; with an engine, one that asks it for its parameters in the loader's workers."""

    def __init__(self, engine=None):
        self.engine = engine

    def __len__(self):
        return 8

    def __getitem__(self, at):
        return torch.full((8,), float(at)) if self.engine is None else self.engine.params["w"]


def loader(dataset):
    return torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)


def test_workers_of_a_loader_are_forked_from_a_live_engine(engine):
    found = []
    for _ in range(2):
        for rows in loader(Rows()):
            engine.train_batch(rows.numpy())
            found.append(float(rows[0, 0]))
    assert found == [0.0, 2.0, 4.0, 6.0] * 2


def test_a_loader_whose_workers_use_the_engine_is_told(engine):
    batches = iter(loader(Rows(engine)))
    for _ in range(4):
        with pytest.raises(PolyaccelError) as caught:
            next(batches)
        assert "polyaccel.errors.PolyaccelError" in str(caught.value)
    # The end ends the workers too. Garbage that has them takes ten seconds of whichever test it is collected in.
    assert next(batches, None) is None


def test_auxiliary_output_keeps_its_values():
    """XLA copies a parameter that is an output as it is; were it the engine's memory, it would change."""

    def check(engine):
        engine.eval_batch(batch())
        kept = engine.aux["w"]
        engine.train_batch(batch())
        np.testing.assert_array_equal(kept, 0.5)
        assert float(engine.params["w"][0, 0]) != 0.5

    with_engine(check, fn=lambda params, batch, rng: (loss(params, batch, rng), {"w": params["w"]}))


def test_random_keys_follow_from_seed_rank_and_count():
    def fn(params, batch, rng):
        noise = 0.0 if rng is None else jax.random.uniform(rng)
        return loss(params, batch, rng), noise

    def drawn(ranks, seed):
        engine = polyaccel.initialize(model=fn, params=weights(), config=CONFIG, seed=seed)
        found = []
        for _ in range(2):
            engine.train_batch(batch())
            found.append(float(engine.aux))
        engine.eval_batch(batch())
        assert float(engine.aux) == 0.0
        return found

    first, other = run_threads(2, drawn, 0), run_threads(2, drawn, 1)
    assert len({value for run in (*first, *other) for value in run}) == 8
    assert run_threads(2, drawn, 0) == first


@pytest.mark.parametrize(
    ("fn", "named"),
    [
        (lambda params, batch, rng: batch @ params["w"], "losses.mean()"),
        (lambda params, batch, rng: jnp.int32(3), "losses.mean()"),
    ],
)
def test_a_function_without_a_loss_is_refused(fn, named: str):
    def check(engine):
        with pytest.raises(PolyaccelError) as caught:
            engine.train_batch(batch())
        assert named in str(caught.value)
        engine.zero_grad()

    with_engine(check, fn=fn)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch_autocast.enabled"),
        ({"optimizer": {"type": "Adadelta", "params": {}}}, "optimizer.type"),
    ],
)
def test_what_is_not_there_is_refused(changes, key):
    with pytest.raises(ConfigError) as caught:
        with_engine(None, config={**CONFIG, **changes})
    assert caught.value.problems[0].key == key


@pytest.mark.parametrize("leaf", ["text", object(), 1j])
def test_leaves_that_are_no_arrays_are_refused(leaf):
    with pytest.raises(ShardingError) as caught:
        with_engine(None, params={**weights(), "other": leaf})
    assert "'other'" in str(caught.value)


def test_a_batch_is_cut_into_micro_batches():
    rows = np.random.default_rng(0).standard_normal((6, 8), dtype=np.float32)
    config = make_config(2, accumulation=3)

    def losses(engine, data):
        return [float(engine.train_batch(data())) for _ in range(2)]

    whole = with_engine(partial(losses, data=lambda: rows), config=config)
    assert whole == with_engine(partial(losses, data=lambda: iter(np.split(rows, 3))), config=config)

    def check(engine):
        with pytest.raises(PolyaccelError) as caught:
            engine.train_batch(rows[:5])
        assert caught.value.value == 5

    with_engine(check, config=config)


def test_fp16_skips_overflows_and_lowers_the_scale():
    config = {**CONFIG, "fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}}

    def check(engine):
        scale = engine.get_loss_scale()
        engine.train_batch(100 * batch())
        assert engine.skipped_steps == 1
        assert engine.get_loss_scale() == scale / 2
        for _ in range(40):
            engine.train_batch(batch())
        assert engine.was_step_applied()
        assert np.isfinite(engine.metrics.grad_norm)

    with_engine(check, config=config)
