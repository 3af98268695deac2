"""Ranks of one host need no torch: they meet by themselves, and share memory in numpy arrays."""

from __future__ import annotations

import os
import subprocess
import sys

from backend_marks import needs

pytestmark = needs("shm")

SCRIPT = """
import sys
sys.modules["torch"] = None  # as if it were not installed
from polyaccel import comm
from polyaccel.core.types import DType
for turn in range(2):
    comm.init_distributed(timeout=100)
    ours = comm.default_communicator()
    buffer = ours.allocate(60_000, DType.FLOAT32)
    buffer.fill(1.0 + ours.rank)
    ours.all_reduce(buffer)
    shared = ours.allocate_shared(2_000, DType.FLOAT32)
    own = shared.whole
    own.view(1_000 * ours.rank, 1_000).fill(7.0 + ours.rank)
    ours.all_gather(own, own.view(1_000 * ours.rank, 1_000))
    seen = shared.private_view.raw.tolist()
    print(ours.backend, type(buffer.raw).__name__, sorted(set(buffer.raw.tolist())), sorted(set(seen)))
    comm.destroy_process_group()
assert sys.modules["torch"] is None
"""


def test_ranks_without_torch_share_memory() -> None:
    # Nobody listens on the port, which only tells jobs apart.
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(1 + os.getpid() % 60_000)}
    shared.pop("POLYACCEL_COMM", None)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [out for out, _ in answers] == ["shm ndarray [3.0] [7.0, 8.0]\n" * 2] * 2, answers
