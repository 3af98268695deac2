"""`mesh.capacity` for JAX functions: unequal parts with the bits of equal ones."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

from jax_models import leaves
from optax_runs import STEPS, batches, loss, start

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads


def engine_of(stage, capacity, **sections):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 500, "param_persistence_threshold": 0},
        "mesh": {} if capacity is None else {"capacity": capacity},
    }
    return polyaccel.initialize(model=loss, params=start(), config=config | sections)


def trained(stage, capacity):
    def go(communicator):
        engine = engine_of(stage, capacity)
        for at in range(STEPS):
            engine.train_batch(batches(2, at)[communicator.rank])
        found = leaves(engine.params)
        engine.destroy()
        return {name: np.asarray(value) for name, value in found.items()}

    return run_threads(2, go)


@pytest.mark.parametrize("stage", [1, 2])
def test_unequal_parts_have_the_bits_of_equal_ones(stage):
    for wanted, found in zip(trained(stage, None), trained(stage, [1, 3]), strict=True):
        assert all(np.array_equal(found[name], value) for name, value in wanted.items())


def test_native_execution_refuses_capacities():
    with pytest.raises(ConfigError) as caught:
        engine_of(2, [1], jax={"execution": "native"})
    assert "mesh.capacity" in {problem.key for problem in caught.value.problems}
