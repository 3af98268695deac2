"""Training over oneCCL equals that over shared memory: bit by bit with two ranks, up to rounding with three."""

from __future__ import annotations

import pytest
from parity_models import assert_bitwise, assert_close, make_config, parity_model, relative_distance, snapshot, train

from polyaccel.comm.ccl import CclBackend
from polyaccel.testkit.procs import RankPool

pytestmark = pytest.mark.skipif(not CclBackend.probe().usable, reason=CclBackend.probe().reason)
STEPS = 3
ZERO = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 10}


@pytest.fixture(scope="module", params=[2, 3])
def pools(request):
    """A pool joined by ccl and one joined by shm, of as many ranks."""
    with RankPool(request.param, backend="ccl") as ccl, RankPool(request.param, backend="shm") as shm:
        yield ccl, shm


def train_here(communicator, config):
    """One rank's run, inside its process."""
    return communicator.backend, train(communicator, parity_model(), config, STEPS)


def runs_of(pool, backend, config):
    found = pool.run(train_here, config)
    assert {name for name, _ in found} == {backend}
    runs = [run for _, run in found]
    for run in runs[1:]:
        assert_bitwise(run.params, runs[0].params)
        assert run.norms == runs[0].norms
    return runs


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_that_over_shared_memory(pools, stage):
    config = make_config(stage, accumulation=2, gradient_clipping=0.5, zero=ZERO)
    ccl, shm = (runs_of(pool, name, config) for pool, name in zip(pools, ("ccl", "shm"), strict=True))
    if len(ccl) == 2:
        assert [run.losses for run in ccl] == [run.losses for run in shm]
        assert_bitwise(ccl[0].params, shm[0].params)
        return
    assert_close(ccl[0].params, shm[0].params)
    for one, other in zip(ccl, shm, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-5)
    assert ccl[0].norms == pytest.approx(shm[0].norms, rel=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_bfloat16_stays_near(pools, stage):
    config = make_config(stage, accumulation=2, bf16={"enabled": True}, zero=ZERO)
    ccl, shm = (runs_of(pool, name, config) for pool, name in zip(pools, ("ccl", "shm"), strict=True))
    assert relative_distance(ccl[0].params, shm[0].params, snapshot(parity_model())) < 0.03
