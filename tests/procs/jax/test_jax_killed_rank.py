"""A rank that dies while all are inside XLA's program at stage 3: the others end, and say who it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

from polyaccel.comm.backends.shm.backend import ShmBackend
from polyaccel.job.ports import free_port

PROGRAM = Path(__file__).parents[2] / "support" / "jobs" / "jax_killed_rank.py"
PATIENCE_S = 200


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "backend",
    ["gloo", pytest.param("shm", marks=pytest.mark.skipif(not ShmBackend.probe().usable, reason="needs Linux"))],
)
def test_the_survivors_name_it_and_end(backend):
    environment = {
        **os.environ,
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "POLYACCEL_COMM": backend,
    }
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            text=True,
            **pipes,
        )
        for rank in range(3)
    ]
    try:
        told = [ranks[rank].stdout.readline() for rank in (0, 2)]
        errors = [rank.communicate(timeout=PATIENCE_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [7, -signal.SIGKILL, 7], errors
    for text in told:
        # One that still waits for another survivor, which has ended the call, is told of both.
        assert re.search(r"ranks \[(0, )?1(, 2)?\] did not take part", text), text
