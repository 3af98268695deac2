"""Ranks that fail in the middle of a collective: what the tests of several backends share."""

from __future__ import annotations

import os
import re
import signal

import pytest

from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.core.types import DType
from polyaccel.errors import CommTimeout, LaunchError
from polyaccel.testkit.ranks.procs import RankPool

CALL = "reduce_scatter sum 300 x float32 bucket 7 'grads'"
# A rank may stand still for seconds on a busy machine. One that is well must come within the limit all the same, and
# not be silent for as long as one that is taken for stopped: 15 times as long as the watchdog's looks are apart.
LIMIT_S = 16.0
WATCH_S = 0.6
PATIENCE_S = 60.0
"""Where nobody waits for a limit."""


def signal_in_mid_collective(comm: Communicator, number: int) -> None:
    """Rank 1 gets a signal after the first all-reduce, when the others are in the second."""
    comm = RecordingCommunicator(comm, watch_s=WATCH_S)
    buffer = comm.allocate(50_000, DType.FLOAT32)
    comm.all_reduce(buffer, label="warm-up")
    comm.barrier()
    board = comm.board()
    assert board is not None
    while "barrier" not in board.read(3).get(comm.rank, ""):
        continue
    if comm.rank == 1:
        os.kill(os.getpid(), number)
    part = buffer.view(300, 100)
    comm.reduce_scatter(part, buffer.view(0, 300), async_op=comm.rank == 0, label="grads", bucket=7).wait()


def what_survivors_say_of_a_killed_rank(trio: RankPool) -> str:
    """Kill rank 1; the other two, patient ones, must have raised CommError naming the call. Returns their reports."""
    with pytest.raises(LaunchError) as caught:
        trio.run(signal_in_mid_collective, signal.SIGKILL)
    assert caught.value.value == (1, -9)
    reports = "\n".join(caught.value.__notes__)
    assert "rank 0 raised CommError" in reports
    assert "rank 2 raised CommError" in reports
    assert CALL in reports
    # Whichever connection broke first: the process that has ended is named by both, with its last call, and it alone.
    ended = re.findall(r"rank (\d) \(process \d+ on \S+\) has ended without a word, after #\d+ ", reports)
    assert ended[:2] == ["1", "1"]
    assert set(ended) == {"1"}
    return reports


def what_is_said_of_a_stopped_rank(trio: RankPool) -> CommTimeout:
    """Stop rank 1; it must be named after the limit of `trio`, LIMIT_S. Returns the error."""
    with pytest.raises(CommTimeout) as caught:
        trio.run(signal_in_mid_collective, signal.SIGSTOP)
    assert caught.value.missing_ranks == (1,)
    assert "rank 1 has not reported for" in str(caught.value)
    return caught.value
