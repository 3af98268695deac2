"""What tests of meshes share: processes with several devices each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from polyaccel.testkit.ranks.procs import RankPool

PATIENCE_S = 240.0
DEVICES = {1: 4, 2: 2}
"""Of each process, by the number of processes."""


@pytest.fixture(scope="module")
def at() -> Iterator[Callable[..., Any]]:
    """`at(processes, function, *arguments)`: each process's `function(communicator, *arguments)`."""
    pools: dict[int, RankPool] = {}

    def run(processes: int, function: Any, *arguments: Any) -> Any:
        if processes not in pools:
            flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES[processes]}"
            pools[processes] = RankPool(processes, comm_timeout_s=PATIENCE_S, environ={"XLA_FLAGS": flags})
        return pools[processes].run(function, *arguments, timeout_s=PATIENCE_S)

    yield run
    for pool in pools.values():
        pool.close()
