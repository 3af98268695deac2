"""ccl keeps the contract of communicators over real processes; alone, it is one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from polyaccel.comm.ccl import CclBackend
from polyaccel.testkit.comm import CommContract
from polyaccel.testkit.procs import RankPool

pytestmark = pytest.mark.skipif(not CclBackend.probe().usable, reason=CclBackend.probe().reason)


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], RankPool]]:
    started: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in started:
            started[world_size] = RankPool(world_size, comm_timeout_s=30.0, backend="ccl")
        return started[world_size]

    yield pool
    for one in started.values():
        one.close()


class TestCcl(CommContract):
    world_sizes: ClassVar[tuple[int, ...]] = (2, 3, 4)

    @pytest.fixture(autouse=True)
    def _pools(self, pools: Callable[[int], RankPool]) -> None:
        self.pools = pools

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pools(world_size).run(body, *args)
