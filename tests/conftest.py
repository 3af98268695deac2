"""Fixtures for every test: ranks as processes, started once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from polyaccel.testkit.procs import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """`rank_pool(world_size)`: worker processes joined by gloo, shared by the session and started on first use."""
    pools: dict[int, RankPool] = {}
    yield lambda world_size: pools.setdefault(world_size, RankPool(world_size))
    for pool in pools.values():
        pool.close()
