"""A signal ends a wait for peers over shared memory: its handler runs while the rank waits, and what it raises comes
out of the call."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from backend_marks import needs

pytestmark = needs("shm")

SCRIPT = """
import os, signal, sys
sys.modules["torch"] = None  # starts faster without
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.base import Rendezvous
from polyaccel.comm.backends.shm.backend import ShmBackend
from polyaccel.errors import CommError
from polyaccel.core.types import DType

rank, waits = int(sys.argv[1]), sys.argv[3]
meeting = Rendezvous(rank, 2, rank, 2, None, None, "a test", sys.argv[2])
comm = ShmBackend().connect(meeting, CpuAccelerator(), timeout_s=600)
buffer = comm.allocate(40_000, DType.FLOAT32)
seen = []
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started pytest may ignore it
signal.signal(signal.SIGUSR1, lambda *_: (seen.append(1), print("handled", flush=True)))
comm.all_reduce(buffer)
print("ready", flush=True)
try:
    if rank == 1:
        sys.stdin.readline()
    if waits == "message" and rank == 0:
        comm.recv(buffer, 1)
    elif waits == "work" and rank == 0:
        comm.all_reduce(buffer, async_op=True).wait()
    else:
        comm.all_reduce(buffer)
except KeyboardInterrupt:
    print("interrupted", len(seen), flush=True)
except CommError as error:
    print(error.message, flush=True)
try:
    comm.barrier()
except CommError as error:
    print(error.message, flush=True)
os._exit(0)
"""


def said(rank: subprocess.Popen[str]) -> str:
    """The next line of a rank; the test's time limit is the rank's."""
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


def signal_asleep(rank: subprocess.Popen[str], number: int) -> None:
    """Send a signal once the rank, which has nothing left to do but to wait, sleeps."""
    while Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        continue
    rank.send_signal(number)


@pytest.mark.parametrize("waits", ["collective", "message", "work"])
def test_an_interrupt_ends_a_wait(tmp_path: Path, waits: str) -> None:
    """Rank 0 waits, for up to 600 s, for rank 1, which waits for a line that comes when rank 0 has ended its wait."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-u", "-c", SCRIPT, str(rank), f"file://{tmp_path}/store", waits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for rank in range(2)
    ]
    try:
        first, second = ranks
        assert [said(rank) for rank in ranks] == ["ready", "ready"]
        signal_asleep(first, signal.SIGUSR1)
        assert said(first) == "handled"
        signal_asleep(first, signal.SIGINT)
        assert said(first) == "interrupted 1"
        if waits == "work":
            return  # the helper's call is still under way
        assert said(first).endswith("barrier on rank 0 failed: a signal interrupted an earlier call")
        assert second.stdin is not None
        second.stdin.write("go on\n")
        assert "ranks [0] did not take part" in said(second)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
