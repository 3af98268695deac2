"""The plugin keeps polyaccel's contracts: these few lines are all that a vendor has to write."""

from __future__ import annotations

import subprocess
import sys
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


LAST_COPIES = """
import time, torch, polyaccel_simdev.device
from polyaccel_simdev import _device
class Late:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)
_late = Late()  # the interpreter, which is ending, deletes names like this one first
source = torch.ones(1000, device="simdev")
for _ in range(40):
    target = torch.empty(1000).pin_memory()
    target.copy_(source, non_blocking=True)
    _device.keep_busy(10, 0)
"""


def test_queued_work_does_not_outlive_the_interpreter() -> None:
    """Without `end_queues` at exit, about every third process was killed by SIGABRT."""
    for _ in range(4):
        job = subprocess.run([sys.executable, "-c", LAST_COPIES], capture_output=True, text=True, timeout=100)
        assert job.returncode == 0, job.stderr
