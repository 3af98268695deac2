"""The plugin keeps polyaccel's contracts: these few lines are all that a vendor has to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from polyaccel_simdev.accelerator import SimdevAccelerator

from polyaccel.testkit.accelerator import AcceleratorContract
from polyaccel.testkit.comm import CommContract
from polyaccel.testkit.ranks.procs import RankPool


class TestSimdev(AcceleratorContract):
    def make(self) -> SimdevAccelerator:
        return SimdevAccelerator()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="simcomm", accelerator="simdev") as pool:
        yield pool


class TestSimcomm(CommContract):
    world_sizes = (2,)

    @pytest.fixture(autouse=True)
    def _pool(self, pool: RankPool) -> None:
        self.pool = pool

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pool.run(body, *args)
