"""Fixtures for every test: ranks as processes, started once a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from polyaccel.testkit.mpi import MpiRankPool
from polyaccel.testkit.procs import Memory, RankPool

# What a measurement on this machine would choose is no test's business. Those of matrix products say what they want.
os.environ.setdefault("POLYACCEL_MATRIX_KERNELS", "off")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """`rank_pool(world_size)`: worker processes joined by gloo, shared by the session and started on first use."""
    pools: dict[int, RankPool] = {}
    yield lambda world_size: pools.setdefault(world_size, RankPool(world_size))
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def mpi_pool() -> Iterator[Callable[..., MpiRankPool]]:
    """`mpi_pool(world_size, memory="torch")`: ranks of an mpirun, shared by the session and started on first use."""
    pools: dict[tuple[int, Memory], MpiRankPool] = {}

    def pool(world_size: int, memory: Memory = "torch") -> MpiRankPool:
        return pools.setdefault((world_size, memory), MpiRankPool(world_size, memory=memory))

    yield pool
    for one in pools.values():
        one.close()
