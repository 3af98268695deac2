"""The GPT of the examples in torch and in JAX where ranks are processes: the same run over gloo and shared memory."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

from jax_models import jax_gpt, make_config, torch_gpt, train_jax, train_torch

from polyaccel.comm.shm import ShmBackend
from polyaccel.testkit.procs import RankPool

STEPS = 20
STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def pools(rank_pool):
    """`pools(backend, world)`."""
    own = {}

    def pool(backend, world):
        if backend == "gloo":
            return rank_pool(world)
        return own.setdefault(world, RankPool(world, backend=backend, comm_timeout_s=120.0))

    yield pool
    for one in own.values():
        one.close()


def torch_here(communicator, config):
    return train_torch(communicator, torch_gpt(), config, STEPS)


def jax_here(communicator, config):
    return train_jax(communicator, jax_gpt(), config, STEPS)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("world", "accumulation"), [(2, 3), (3, 1)])
@pytest.mark.parametrize(
    "backend",
    ["gloo", pytest.param("shm", marks=pytest.mark.skipif(not ShmBackend.probe().usable, reason="needs Linux"))],
)
def test_torch_and_jax_agree(pools, backend, world, accumulation):
    ranks = pools(backend, world)
    for stage in STAGES:
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
def test_torch_and_jax_agree_in_bf16(pools):
    config = make_config(STAGES[-1], accumulation=3, bf16={"enabled": True})
    ranks = pools("gloo", 2)
    of_torch = ranks.run(torch_here, config, timeout_s=150)[0]
    of_jax = ranks.run(jax_here, config, timeout_s=150)[0]
    assert of_jax.losses == pytest.approx(of_torch.losses, rel=1e-2)
