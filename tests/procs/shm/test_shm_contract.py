"""shm keeps the contract of communicators over real processes, also with more ranks than cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from polyaccel.testkit.comm import CommContract
from polyaccel.testkit.ranks.procs import RankPool


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], RankPool]]:
    started: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in started:
            started[world_size] = RankPool(world_size, comm_timeout_s=20.0, backend="shm")
        return started[world_size]

    yield pool
    for one in started.values():
        one.close()


class TestShm(CommContract):
    @pytest.fixture(autouse=True)
    def _pools(self, pools: Callable[[int], RankPool]) -> None:
        self.pools = pools

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pools(world_size).run(body, *args)
