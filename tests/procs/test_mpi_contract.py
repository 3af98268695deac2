"""mpi keeps the contract of communicators under a real mpirun, with more ranks than cores too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from mpi_ranks import needs_mpi

from polyaccel.testkit.comm import CommContract
from polyaccel.testkit.mpi import MpiRankPool

pytestmark = needs_mpi


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], MpiRankPool]]:
    started: dict[int, MpiRankPool] = {}

    def pool(world_size: int) -> MpiRankPool:
        if world_size not in started:
            started[world_size] = MpiRankPool(world_size, comm_timeout_s=20.0)
        return started[world_size]

    yield pool
    for one in started.values():
        one.close()


class TestMpi(CommContract):
    world_sizes: ClassVar[tuple[int, ...]] = (2, 3, 4)

    @pytest.fixture(autouse=True)
    def _pools(self, pools: Callable[[int], MpiRankPool]) -> None:
        self.pools = pools

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pools(world_size).run(body, *args)
