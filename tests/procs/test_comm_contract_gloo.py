"""gloo keeps the contract of communicators, over real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyaccel.testkit.comm import CommContract
from polyaccel.testkit.procs import RankPool


class TestGloo(CommContract):
    @pytest.fixture(autouse=True)
    def _pools(self, rank_pool: Callable[[int], RankPool]) -> None:
        self.pools = rank_pool

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pools(world_size).run(body, *args)
