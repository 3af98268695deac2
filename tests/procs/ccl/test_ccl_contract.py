"""ccl keeps the contract of communicators over real processes, also with more ranks than cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from backend_marks import needs

from polyaccel.comm.backends.ccl.communicator import CclCommunicator
from polyaccel.comm.base import Communicator
from polyaccel.testkit.comm import CommContract
from polyaccel.testkit.ranks.procs import RankPool

pytestmark = needs("ccl")


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
    @pytest.fixture(autouse=True)
    def _pools(self, pools: Callable[[int], RankPool]) -> None:
        self.pools = pools

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pools(world_size).run(body, *args)


def settings(comm: Communicator) -> list[str | None]:
    assert isinstance(comm, CclCommunicator)
    return [os.environ.get(name) for name in ("CCL_ATL_SHM", "CCL_WORKER_OFFLOAD", "CCL_PROCESS_LAUNCHER")]


def test_what_the_user_sets_is_kept_and_the_rest_is_set() -> None:
    with RankPool(2, backend="ccl", environ={"CCL_ATL_SHM": "0"}) as pool:
        assert pool.run(settings) == [["0", "0", "none"]] * 2
