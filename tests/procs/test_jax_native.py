"""Native mode trains as views mode does: several devices in one process, and several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import native_jax_model as model

import polyaccel
from polyaccel.errors import CommError, ConfigError, PolyaccelError, ShardingError
from polyaccel.testkit.procs import RankPool
from polyaccel.testkit.threads import run_threads

pytestmark = pytest.mark.timeout(300)  # programs to compile, on a machine that may be slow and busy
PATIENCE_S = 240.0
THREE_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
CASES = [
    ("one device", 1, 3, {}),
    ("one device", 2, 1, {}),
    ("three devices", 0, 1, {}),
    ("three devices", 1, 3, {}),
    ("three devices", 2, 2, {"prescale_gradients": True, "gradient_clipping": 0.0}),
    ("two processes", 0, 2, {"gradient_allreduce_op": "sum"}),
    ("two processes", 1, 1, {}),
    ("two processes", 2, 3, {}),
]
"""(devices and processes, stage, accumulation, changes of the config)"""
OPTIMIZERS = {
    "Adam": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adagrad": {"lr": 1e-2, "weight_decay": 0.01},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "Lamb": {"lr": 1e-2, "weight_decay": 0.1},
}


@pytest.fixture(scope="module")
def three_devices():
    with RankPool(1, environ=THREE_DEVICES) as pool:
        yield pool


@pytest.fixture(scope="module")
def two_processes():
    with RankPool(2, comm_timeout_s=PATIENCE_S) as pool:
        yield pool


@pytest.fixture
def native(three_devices, two_processes):
    """`native(world, *arguments of model.train)`: each process's result."""

    def run(world, *arguments, **named):
        if world == "one device":
            return run_threads(1, lambda ranks: model.train(ranks, *arguments, **named), timeout_s=PATIENCE_S)
        pool, devices = (three_devices, 3) if world == "three devices" else (two_processes, 1)
        return pool.run(train_here, arguments, {"devices": devices, **named}, timeout_s=PATIENCE_S)

    return run


def train_here(communicator, arguments, named):
    return model.train(communicator, *arguments, **named)


def views(world, *arguments, **named):
    """Losses of each process, norms, parameters and skipped steps in views mode."""
    count = {"one device": 1, "three devices": 3, "two processes": 2}[world]
    runs = run_threads(count, lambda ranks: model.train(ranks, *arguments, **named), timeout_s=PATIENCE_S)
    losses = [run[0] for run in runs]
    return [np.mean(losses, axis=0)] if world == "three devices" else losses, *runs[0][1:]


def check(found, expected, rel=1e-6, atol=2e-6):
    """Losses to `rel`, as the norms but for the last digits of float32 sums, parameters to `atol`."""
    losses, norms, params, skipped = expected
    for own, wanted in zip(found, losses, strict=True):
        assert own[0] == pytest.approx(list(wanted), rel=rel)
        assert own[1] == pytest.approx(norms, rel=10 * rel)
        assert own[3] == skipped
        for fqn, value in own[2].items():
            np.testing.assert_allclose(value, params[fqn], rtol=0, atol=atol, err_msg=fqn)
    assert found[0][0][-1] < 0.9 * found[0][0][0]


@pytest.mark.parametrize(("world", "stage", "accumulation", "changes"), CASES)
def test_as_in_views_mode(native, world, stage, accumulation, changes):
    expected = views(world, model.make_config(stage, accumulation, **changes))
    check(native(world, model.make_config(stage, accumulation, native=True, **changes)), expected)


@pytest.mark.parametrize(
    ("name", "stage", "world"), [*((name, 2, "three devices") for name in OPTIMIZERS), ("Lamb", 0, "one device")]
)
def test_every_optimizer(native, name, stage, world):
    changes = {"optimizer": {"type": name, "params": OPTIMIZERS[name]}, "scheduler": None}
    expected = views(world, model.make_config(stage, **changes))
    # Lion's and LAMB's steps turn on signs and ratios of what is nearly zero.
    check(native(world, model.make_config(stage, native=True, **changes)), expected, rel=1e-5, atol=1e-5)


@pytest.mark.parametrize(("world", "stage"), [("three devices", 0), ("two processes", 2)])
def test_bf16_with_precise_masters(native, world, stage):
    changes = {"bf16": {"enabled": True}}
    expected = views(world, model.make_config(stage, 2, **changes))
    check(native(world, model.make_config(stage, 2, native=True, **changes)), expected, rel=1e-2, atol=2e-2)


def test_fp16_skips_overflows(native):
    """A scale at which the first gradients overflow: both modes skip the same steps."""
    changes = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
    expected = views("three devices", model.make_config(2, 2, **changes), range(16))
    found = native("three devices", model.make_config(2, 2, native=True, **changes), range(16))
    assert 0 < expected[3] < 16
    assert found[0][3] == expected[3]
    assert found[0][0] == pytest.approx(list(expected[0][0]), rel=1e-3)
    assert found[0][1] == pytest.approx(expected[1], rel=1e-2, nan_ok=True)


def pieces_here(communicator):
    """`grad_step` and `step` beside `train_batch`; a culprit; auxiliary output; evaluation."""
    config = model.make_config(1, 2, native=True)
    batches = []
    for micro in (0, 1):
        parts = [model.samples(0, micro, rank) for rank in range(3)]
        batches.append(tuple(np.concatenate(part) for part in zip(*parts, strict=True)))
    whole, parts = model.start(config), model.start(config)
    loss = whole.train_batch(iter(batches))
    losses = []
    for batch in batches:
        losses.append(parts.grad_step(batch))
        parts.step()
    np.testing.assert_allclose(np.mean(losses), loss, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(whole.params), jax.tree.leaves(parts.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(parts.aux["x"], batches[1][0][[0, 2, 4]])
    evaluated = model.loss(parts.params, batches[0], None)[0]
    np.testing.assert_allclose(parts.eval_batch(batches[0]), evaluated, rtol=1e-6)

    spoilt = model.start(model.make_config(2, native=True, fp16={"enabled": True}))
    x, y = batches[0]
    before = jax.tree.map(np.array, spoilt.params)
    spoilt.grad_step((np.where(np.arange(6)[:, None] == 5, np.inf, x).astype(np.float32), y))
    spoilt.step()
    assert not spoilt.was_step_applied()
    assert spoilt._result.culprit is not None
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(spoilt.params), strict=True):
        np.testing.assert_array_equal(one, other)

    with pytest.raises(PolyaccelError, match="5 samples cannot be cut over the 3 devices"):
        parts.grad_step((x[:5], y[:5]))
    captured = jax.numpy.asarray(model.initial_params()["first"]["weight"])
    bad = polyaccel.initialize(
        model=lambda params, batch, rng: (batch[0] @ captured).sum() * params["w"].sum(),
        params={"w": captured},
        config=config,
    )
    with pytest.raises(ShardingError, match="closed over parameter 'w'"):
        bad.grad_step(batches[0])
    return True


def test_parts_of_a_step(three_devices):
    assert three_devices.run(pieces_here, timeout_s=PATIENCE_S) == [True]


def resume_after_failure(communicator, folder):
    """An update that fails loses what it was lent; a checkpoint brings it back."""
    engine = model.start(model.make_config(2, native=True))
    batch = model.samples(0, 0, 0)
    engine.train_batch(batch)
    engine.save_checkpoint(folder)
    kept = jax.tree.map(np.array, engine.params)
    update = engine._program.step

    def fail(*arguments):
        update(*arguments)
        raise RuntimeError("in the middle")

    engine._program.step = fail
    with pytest.raises(RuntimeError, match="in the middle"):
        engine.train_batch(batch)
    engine._program.step = update
    for use in (lambda: engine.train_batch(batch), lambda: engine.params, lambda: engine.save_checkpoint(folder)):
        with pytest.raises(PolyaccelError, match="an update failed"):
            use()
    engine.load_checkpoint(folder)
    for one, other in zip(jax.tree.leaves(engine.params), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(one, other)
    engine.train_batch(batch)
    return True


def test_a_failed_update_is_not_trained_on(tmp_path):
    assert run_threads(1, resume_after_failure, str(tmp_path), timeout_s=PATIENCE_S) == [True]


def test_checkpoints_go_between_modes_and_worlds(three_devices, two_processes, tmp_path):
    """Each leg takes up what the one before saved; together they are one run."""
    places = {"views": 3, "devices": 1, "processes": 2, "device": 1}
    stages = {"views": 2, "devices": 0, "processes": 2, "device": 1}

    def go(place, steps, load=None, save=None):
        arguments = (model.make_config(stages[place], native=place != "views"), steps, places[place], load, save)
        if place in ("views", "device"):
            return run_threads(places[place], model.train_whole_batches, *arguments, timeout_s=PATIENCE_S)[0]
        pool = three_devices if place == "devices" else two_processes
        return pool.run(model.train_whole_batches, *arguments, timeout_s=PATIENCE_S)[0]

    whole = go("views", range(8))
    folder = None
    for at, place in enumerate(["views", "devices", "processes", "device", "views"]):
        save = str(tmp_path / str(at))
        params = go(place, range(2 * at, 2 * at + 2) if at < 4 else range(8, 8), folder, save)
        folder = save
    for fqn, value in params.items():
        np.testing.assert_allclose(value, whole[fqn], rtol=0, atol=5e-6, err_msg=fqn)


def late_here(communicator):
    jax.numpy.zeros(1).block_until_ready()
    with pytest.raises(CommError, match=r"JAX was used on ranks \[0, 1\] before its processes met"):
        model.start(model.make_config(2, native=True))
    return True


def test_processes_that_meet_too_late_are_told_so():
    with RankPool(2) as pool:
        assert pool.run(late_here, timeout_s=PATIENCE_S) == [True, True]


def test_ranks_of_the_launcher_meet(tmp_path):
    """The service of JAX beside the launcher's own port, and arrays of JAX made after the meeting."""
    command = [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", str(Path(__file__).with_name("native_job.py"))]
    job = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert all(f"trained: rank {rank} of 2" in job.stdout for rank in range(2)), job.stdout


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer.device"),
        ({"bf16": {"enabled": True, "stochastic_rounding": True}}, "bf16.stochastic_rounding"),
    ],
)
def test_what_native_mode_has_not(changes, key):
    def go(ranks):
        with pytest.raises(ConfigError, match=key):
            model.start({**model.make_config(1, native=True), **changes})

    run_threads(1, go)
