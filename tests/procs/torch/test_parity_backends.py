"""One script gives the same losses, norms and parameters over every backend, at every stage: those of `local`, whose
ranks are threads. Bit by bit where a backend adds in rank order, and up to rounding where its library decides.

What is not installed is skipped; `make test-mpi` runs this under two more MPIs, `make test-ccl` with oneCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from backend_marks import over
from mesh_models import train_cut, train_on_a_mesh
from pairwise import combinations
from parity_models import (
    SMALL_BUCKET,
    Run,
    assert_bitwise,
    assert_close,
    make_config,
    parity_model,
    relative_distance,
    snapshot,
    train,
    train_on_threads,
)

from polyaccel import comm
from polyaccel.comm.base import Communicator
from polyaccel.comm.init.setup import BACKEND_VARIABLE
from polyaccel.comm.launchers.request import VARIABLES
from polyaccel.testkit.ranks.procs import RankPool

STEPS = 2
ZERO = {"reduce_bucket_size": SMALL_BUCKET, "stage3_prefetch_bucket_size": SMALL_BUCKET}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"accumulation": 3, "gradient_clipping": 0.5},
    "bf16": {"bf16": {"enabled": True}},
}
BACKENDS = over("gloo", "shm", "mpi", "ccl")


@cache
def on_threads(world: int, stage: int, case: str) -> Run:
    return train_on_threads(world, config_of(stage, case), STEPS)


def config_of(stage: int, case: str) -> dict[str, Any]:
    return make_config(stage, zero=ZERO, **CASES[case])


def train_here(communicator: Communicator, config: dict[str, Any]) -> tuple[str, bool, Run]:
    """One rank's run, inside its process."""
    return communicator.backend, communicator.deterministic, train(communicator, parity_model(), config, STEPS)


@combinations(backend=BACKENDS, stage=[0, 1, 2, 3], world=[2, 3], case=list(CASES))
def test_every_backend_trains_as_local_does(
    rank_pool: Callable[..., RankPool], backend: str, world: int, stage: int, case: str
) -> None:
    expected = on_threads(world, stage, case)
    names, deterministic, runs = zip(*rank_pool(world, backend).run(train_here, config_of(stage, case)), strict=True)
    assert set(names) == {backend}
    for run in runs:
        assert_bitwise(run.params, runs[0].params)
        assert run.norms == runs[0].norms
    run = runs[0]
    if all(deterministic) or world == 2:  # two numbers have one sum
        assert run.losses == expected.losses
        assert run.norms == expected.norms
        assert_bitwise(run.params, expected.params)
    elif case == "fp32":
        assert run.losses == pytest.approx(expected.losses, rel=1e-5)
        assert run.norms == pytest.approx(expected.norms, rel=1e-5)
        assert_close(run.params, expected.params)
    else:
        assert relative_distance(run.params, expected.params, snapshot(parity_model())) < 0.03


@pytest.mark.parametrize("world", [2, 3])
def test_local_gives_the_same_losses_at_every_stage(world: int) -> None:
    replicated, _, sharded, everything = (on_threads(world, stage, "fp32").losses for stage in range(4))
    assert on_threads(world, 1, "fp32").losses == replicated
    assert everything == sharded
    assert sharded == pytest.approx(replicated, rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_trains_over_every_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    comm.init_distributed()
    try:
        name, _, run = train_here(comm.default_communicator(), config_of(2, "fp32"))
    finally:
        comm.destroy_process_group()
    assert name == backend
    assert run.losses == on_threads(1, 2, "fp32").losses


@cache
def on_a_mesh_of_threads(data: int, tensor: int, stage: int) -> list[Run]:
    return train_on_a_mesh(data, tensor, config_of(stage, "fp32"), STEPS)


@combinations(backend=BACKENDS, stage=[1, 3], mesh=[(1, 2), (2, 2)])
def test_every_backend_trains_a_cut_model_as_threads_do(
    rank_pool: Callable[..., RankPool], backend: str, stage: int, mesh: tuple[int, int]
) -> None:
    """One whose layers ranks share, along the axis `tensor` of a mesh."""
    data, tensor = mesh
    found = rank_pool(data * tensor, backend).run(train_cut, tensor, config_of(stage, "fp32"), STEPS)
    for run, expected in zip(found, on_a_mesh_of_threads(data, tensor, stage), strict=True):
        assert run.losses == pytest.approx(expected.losses, rel=1e-5)
        assert run.norms == pytest.approx(expected.norms, rel=1e-5)
        if backend == "ccl":  # whose library adds in an order of its own
            assert_close(run.params, expected.params)
        else:
            assert_bitwise(run.params, expected.params)
