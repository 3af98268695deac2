"""Files of the nvme tier when processes die, live on, or fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from parity_models import SMALL_BUCKET, assert_bitwise, make_config, parity_model, train

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.types import DType
from polyaccel.offload.nvme import NvmeTier
from polyaccel.offload.tier import TierOptions

TIMEOUT_S = 60.0
JOB = """
import os, sys
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.offload.nvme import NvmeTier
from polyaccel.offload.tier import TierOptions
from polyaccel.core.types import DType

host = CpuAccelerator("numpy")
tier = NvmeTier()
tier.open(host, host, TierOptions(path=sys.argv[1], run_id="other"))
tier.allocate("a", 4, DType.FLOAT32).fill(3.0)
print("ready", flush=True)
"""
WAIT = "sys.stdin.readline()\n"
Start = Callable[[Path, str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(path, code)`: a process that holds states below `path`, ready."""
    started: list[subprocess.Popen[str]] = []

    def begin(path: Path, code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", JOB + code, str(path)]
        job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(job)
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        return job

    yield begin
    for job in started:
        job.kill()
        job.communicate(timeout=TIMEOUT_S)


def use(path: Path) -> None:
    """A job of ours on the same path."""
    host, tier = CpuAccelerator("numpy"), NvmeTier()
    tier.open(host, host, TierOptions(path=str(path), run_id="ours"))
    tier.allocate("a", 4, DType.FLOAT32)
    tier.close()


def test_files_of_a_living_job_stay_and_those_of_a_killed_one_go(tmp_path: Path, start: Start) -> None:
    job = start(tmp_path, WAIT)
    file = tmp_path / "polyaccel-other" / "rank0" / "a"
    use(tmp_path)
    assert file.read_bytes()[:16] == b"\x00\x00\x40\x40" * 4
    os.kill(job.pid, signal.SIGKILL)
    job.wait(TIMEOUT_S)
    assert file.exists()
    use(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_without_closing_leaves_nothing(tmp_path: Path, start: Start) -> None:
    job = start(tmp_path, "")
    assert job.wait(TIMEOUT_S) == 0
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_forked_child_takes_nothing_away(tmp_path: Path, start: Start) -> None:
    fork = "child = os.fork()\nif not child:\n    tier.close()\n    sys.exit()\n"
    job = start(tmp_path, fork + "print(os.waitpid(child, 0)[1], flush=True)\n" + WAIT)
    assert job.stdout is not None
    assert job.stdout.readline() == "0\n"
    assert (tmp_path / "polyaccel-other" / "rank0" / "a").exists()


def train_here(communicator: Any, config: dict[str, Any], steps: int) -> Any:
    """One rank's run, inside its process."""
    return train(communicator, parity_model(), config, steps)


def test_ranks_in_processes_of_their_own_share_a_path(tmp_path: Path, rank_pool: Any) -> None:
    pipelined = {"device": "nvme", "nvme_path": str(tmp_path), "pipeline_read": True, "pipeline_write": True}
    runs = {}
    for name, offload in (("none", {}), ("nvme", {"offload_optimizer": pipelined})):
        config = make_config(2, zero={"reduce_bucket_size": SMALL_BUCKET, **offload})
        runs[name] = rank_pool(2).run(train_here, config, 2)
    for rank in (0, 1):
        assert_bitwise(runs["nvme"][rank].params, runs["none"][rank].params)
    assert list(tmp_path.iterdir()) == []
