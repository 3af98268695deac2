"""The GPT of the examples in torch and in JAX where ranks are processes: the same run over gloo and shared memory."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

from jax_models import jax_gpt, make_config, torch_gpt, train_jax, train_torch
from pairwise import combinations

from polyaccel.comm.backends.shm.backend import ShmBackend

STEPS = 12
STAGES = (0, 1, 2, 3)
BACKENDS = (
    "gloo",
    pytest.param("shm", marks=pytest.mark.skipif(not ShmBackend.probe().usable, reason="needs Linux")),
)


def torch_here(communicator, config):
    return train_torch(communicator, torch_gpt(), config, STEPS)


def jax_here(communicator, config):
    return train_jax(communicator, jax_gpt(), config, STEPS)


@pytest.mark.timeout(500)
@combinations(stage=STAGES, backend=BACKENDS, shape=[pytest.param((2, 3), id="2-3"), pytest.param((3, 1), id="3-1")])
def test_torch_and_jax_agree(rank_pool, stage, backend, shape):
    """`shape`: (ranks, micro-batches of a step)."""
    world, accumulation = shape
    ranks = rank_pool(world, backend)
    config = make_config(stage, accumulation=accumulation)
    of_torch = ranks.run(torch_here, config, timeout_s=150)[0]
    of_jax = ranks.run(jax_here, config, timeout_s=150)
    assert of_jax[0].losses == pytest.approx(of_torch.losses, rel=1e-5)
    assert of_jax[0].norms == pytest.approx(of_torch.norms, rel=1e-4)
    for run in of_jax[1:]:
        assert run.norms == of_jax[0].norms
        for fqn, value in run.params.items():
            np.testing.assert_array_equal(value, of_jax[0].params[fqn])


@pytest.mark.timeout(500)
def test_torch_and_jax_agree_in_bf16(rank_pool):
    config = make_config(STAGES[-1], accumulation=3, bf16={"enabled": True})
    ranks = rank_pool(2)
    of_torch = ranks.run(torch_here, config, timeout_s=150)[0]
    of_jax = ranks.run(jax_here, config, timeout_s=150)[0]
    assert of_jax.losses == pytest.approx(of_torch.losses, rel=1e-2)
