"""State of a function where ranks are processes: at stage 3, and over the devices of native mode."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("equinox")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

import jax
import jax_state_models as models
import jax_steps
import orbax.checkpoint as ocp

from polyaccel.errors import PolyaccelError
from polyaccel.testkit.ranks.procs import RankPool
from polyaccel.testkit.ranks.threads import run_threads

pytestmark = pytest.mark.timeout(300)  # programs to compile, on a machine that may be slow and busy
PATIENCE_S = 240.0
DEVICES = 2
NATIVE = {"jax": {"execution": "native"}}


@pytest.fixture(scope="module")
def devices():
    """`devices(world)`: a pool of so many processes of two devices each."""
    pools = {}

    def pool(world):
        if world not in pools:
            flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES}"
            pools[world] = RankPool(world, comm_timeout_s=PATIENCE_S, environ={"XLA_FLAGS": flags})
        return pools[world]

    yield pool
    for each in pools.values():
        each.close()


@pytest.mark.parametrize(("kind", "world"), [("linen", 3), ("nnx", 2)])
def test_sharded_parameters(rank_pool, kind, world):
    wanted = models.plain(kind, world, 2)
    runs = rank_pool(world).run(models.train, kind, 3, 2, timeout_s=PATIENCE_S)
    for run in runs:
        models.assert_same(run, wanted, has_losses=run is runs[0])


def state_dict_of_shards(communicator):
    """The tree after a step at stage 3; another engine that takes it does the same next step."""
    engine, again = models.engine_of("linen", 3, 1), models.engine_of("linen", 3, 1)
    first, second = (models.batch_of(step, communicator.rank, 1, 1) for step in range(2))
    engine.train_batch(first)
    saved = engine.state_dict()
    again.load_state_dict(saved)
    assert float(engine.train_batch(second)) == float(again.train_batch(second))
    assert _equal(engine.state_dict(), again.state_dict())
    return saved


def _equal(one, other):
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


def test_a_state_dict_of_shards_resumes_without_them(rank_pool):
    saved = rank_pool(2).run(state_dict_of_shards, timeout_s=PATIENCE_S)
    assert _equal(*saved)

    def alone(ranks):
        engine = models.engine_of("linen", 0, 1)
        engine.load_state_dict(saved[0])
        return engine.state_dict()

    assert _equal(run_threads(1, alone)[0], saved[0])


def train_natively(communicator, kind, stage, accumulation):
    return models.train(communicator, kind, stage, accumulation, DEVICES, **NATIVE)


@pytest.mark.parametrize(("kind", "world", "accumulation"), [("function", 2, 2), ("equinox", 1, 1)])
def test_devices_of_native_mode(devices, kind, world, accumulation):
    wanted = models.plain(kind, world * DEVICES, accumulation)
    for run in devices(world).run(train_natively, kind, 2, accumulation, timeout_s=PATIENCE_S):
        models.assert_same(run, wanted, has_losses=False)


def save_and_load(communicator, folder):
    """(state, state after a load, value of the leaf that differs between devices)."""
    engine = models.engine_of("function", 2, 1, **NATIVE)
    engine.train_batch(models.batch_of(0, communicator.rank, 1, DEVICES))
    engine.save_checkpoint(folder)
    again = models.engine_of("function", 2, 1, **NATIVE)
    again.load_checkpoint(folder)
    found = models.flat(engine.state), models.flat(again.state)
    third = models.engine_of("function", 2, 1, **NATIVE)
    with ocp.CheckpointManager(f"{folder}/orbax") as manager:  # whose processes act together, as those of JAX
        manager.save(1, args=ocp.args.StandardSave(engine.state_dict()))
        manager.wait_until_finished()
        third.load_state_dict(manager.restore(1, args=ocp.args.StandardRestore()))
    assert _equal(third.state_dict(), again.state_dict())
    again.state = engine.state
    assert all(np.array_equal(*pair) for pair in zip(models.flat(again.state), found[0], strict=True))
    try:
        again.state = {"mean": np.zeros(1)}
    except PolyaccelError as error:
        return *found, error.hint
    return *found, ""


def test_a_checkpoint_of_native_mode(devices, tmp_path):
    for before, after, hint in devices(2).run(save_and_load, str(tmp_path), timeout_s=PATIENCE_S):
        assert hint
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)


def test_steps_of_native_mode_in_one_program(devices):
    """The devices' carried states are averaged after each step."""
    arguments = ("cycle", 2, 2, DEVICES, (1, 1, 1))
    for losses in devices(2).run(jax_steps.compare, *arguments, timeout_s=PATIENCE_S):
        assert len(losses) == 3
