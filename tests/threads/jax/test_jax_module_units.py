"""Blocks of flax and equinox modules at stage 3: found, gathered one at a time, and of the numbers of stage 2."""

from __future__ import annotations

import logging

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("equinox")

from jax_block_modules import DEPTH, arguments
from jax_models import leaves

import polyaccel
from polyaccel.testkit.ranks.threads import run_threads

BLOCKS = {"linen": "blocks_", "nnx": "blocks.", "equinox": "blocks."}
BY_HAND = ("linen by hand", "nnx by hand", "equinox by hand")


def config(stage):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 64,
            **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
        },
    }


def batch(step):
    random = np.random.default_rng(step)
    return {"x": random.standard_normal((4, 3), np.float32), "y": random.standard_normal(4, np.float32)}


def train(communicator, kind, stage):
    """(losses with that of an evaluation, parameters, units in the order in which they were held in a pass)."""
    engine = polyaccel.initialize(**arguments(kind), config=config(stage))
    losses = [float(engine.train_batch(batch(step))) for step in range(3)]
    losses.append(float(engine.eval_batch(batch(3))))
    found = losses, leaves(engine.params), held_in_a_pass(engine) if stage == 3 else []
    engine.destroy()
    return found


def held_in_a_pass(engine):
    gathering, buckets = engine.zero.params.gathered, engine.zero.layout.buckets
    hold, order = gathering.unshard, []

    def noted(index, **named):
        order.append(buckets[index].kind.unit)
        return hold(index, **named)

    gathering.unshard = noted
    engine.grad_step(batch(0))
    gathering.unshard = hold
    engine.zero_grad()
    return [unit for at, unit in enumerate(order) if at == 0 or order[at - 1] != unit]


def assert_same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert wanted[0][0] != wanted[0][1]
    for fqn, value in wanted[1].items():
        np.testing.assert_allclose(found[1][fqn], value, rtol=1e-5, atol=1e-6, err_msg=fqn)


@pytest.mark.parametrize("kind", BLOCKS)
def test_repeated_blocks_are_units(kind):
    """Called once more than they are many, with arguments of every kind, and random numbers of their own."""
    wanted, found = (run_threads(1, train, kind, stage)[0] for stage in (2, 3))
    assert_same(found, wanted)
    names = [f"{BLOCKS[kind]}{at}" for at in range(DEPTH)]
    assert found[2] == ["", *names, *reversed(names[:-1])]


@pytest.mark.parametrize("kind", BY_HAND)
def test_blocks_that_are_called_as_units(kind):
    wanted, found = (run_threads(1, train, kind, stage)[0] for stage in (2, 3))
    assert_same(found, wanted)


@pytest.mark.parametrize("kind", ["equinox, vmap", "linen, remat", "linen, tied"])
def test_blocks_that_cannot_be_units_are_gathered_with_everything_else(kind, caplog):
    """Inside a transformation of the module's own, or with layers of others."""
    caplog.set_level(logging.WARNING, logger="polyaccel")
    wanted, found = (run_threads(1, train, kind, stage)[0] for stage in (2, 3))
    assert_same(found, wanted)
    assert any("has no units" in record.message for record in caplog.records)
