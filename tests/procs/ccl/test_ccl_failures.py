"""oneCCL's calls cannot be interrupted; whoever waits for them can: a missing rank is named, and nobody hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from backend_marks import needs

from polyaccel.comm.backends.ccl.communicator import CclCommunicator
from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CommError, CommTimeout, LaunchError
from polyaccel.job.ports import free_port
from polyaccel.testkit.comm.values import get, put
from polyaccel.testkit.ranks.procs import RankPool

pytestmark = needs("ccl")
LIMIT_S = 1.2


@pytest.fixture(scope="module")
def trio() -> Iterator[RankPool]:
    with RankPool(3, backend="ccl") as pool:
        yield pool


def signal_in_mid_collective(comm: Communicator, number: int) -> None:
    """Rank 1 gets a signal after the first barrier, when the others are in a reduce-scatter."""
    assert isinstance(comm, CclCommunicator)
    inner, comm = comm, RecordingCommunicator(comm, watch_s=0.05)
    buffer = comm.accelerator.allocate(50_000, DType.FLOAT32)
    comm.barrier()
    board = comm.board()
    assert board is not None
    while "barrier" not in board.read(3).get(comm.rank, ""):
        continue
    inner.timeout_s = LIMIT_S  # from here on somebody is missing
    if comm.rank == 1:
        os.kill(os.getpid(), number)
    part = buffer.view(300, 100)
    comm.reduce_scatter(part, buffer.view(0, 300), async_op=comm.rank == 0, label="grads", bucket=7).wait()


def test_a_stopped_peer_is_named_within_the_time_limit(trio: RankPool) -> None:
    with pytest.raises(CommTimeout) as caught:
        trio.run(signal_in_mid_collective, signal.SIGSTOP, timeout_s=30)
    assert caught.value.missing_ranks == (1,)
    assert "#1 reduce_scatter sum 300 x float32 bucket 7 'grads'" in str(caught.value)


def test_a_killed_peer_is_named_by_the_survivors(trio: RankPool) -> None:
    with pytest.raises(LaunchError) as caught:
        trio.run(signal_in_mid_collective, signal.SIGKILL, timeout_s=30)
    assert caught.value.value == (1, -9)
    survivors = "\n".join(caught.value.__notes__)
    for rank in (0, 2):
        assert f"rank {rank} raised CommTimeout: #1 reduce_scatter" in survivors
    assert re.search(r"rank 1 \(.*\) has ended without a word", survivors)


def late(comm: Communicator) -> list[str]:
    """Rank 0 skips a call that the others make, then all go on."""
    errors = []
    buffer = put(comm, [1.0] * 8, DType.FLOAT32)
    comm.timeout_s = LIMIT_S
    if comm.rank:
        for _ in range(2):
            try:
                comm.all_reduce(buffer)
            except CommError as error:
                errors.append(str(error))
    return errors


def test_calls_behind_one_that_timed_out_fail_at_once(trio: RankPool) -> None:
    _, *others = trio.run(late, timeout_s=30)
    for first, second in others:
        assert first.startswith("#0 all_reduce sum 8 x float32 on rank ")
        assert f"timed out after {LIMIT_S} s" in first
        assert "#0 all_reduce sum 8 x float32 timed out and is still in the way" in second
    trio.close()


def other_way(comm: Communicator) -> None:
    comm = RecordingCommunicator(comm, debug=True, watch_s=None)
    buffer = put(comm, [1.0] * 6, DType.FLOAT32)
    if comm.rank == 2:
        comm.broadcast(buffer, 0)
    else:
        comm.all_reduce(buffer)


def test_debug_mode_names_another_call_at_once(trio: RankPool) -> None:
    with pytest.raises(CommError) as caught:
        trio.run(other_way, timeout_s=30)
    assert all(part in str(caught.value) for part in ("rank 2", "#0", "broadcast", "6 x float32"))


def sums_of_noise(comm: Communicator, numel: int) -> list[bytes | float]:
    """The bytes of all-reduces of noise, then the largest error of a bf16 sum in units of its last place."""
    found: list[bytes | float] = []
    everybody = [np.random.default_rng(rank).standard_normal(numel) for rank in range(comm.world_size)]
    for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16):
        buffer = put(comm, everybody[comm.rank], dtype)
        comm.all_reduce(buffer)
        found.append(buffer.to_bytes())
        if dtype is DType.BFLOAT16:
            terms = [get(comm, put(comm, values, dtype)) for values in everybody]
            largest = np.cumsum(np.abs(terms), axis=0)[-1]  # no partial sum is larger
            error = float(np.max(np.abs(get(comm, buffer) - sum(terms)) / (largest * 2.0**-8)))
    return [*found, error]


@pytest.mark.parametrize("numel", [1, 640, 20_011, 300_007])
def test_all_ranks_get_the_same_bits_and_bf16_is_rounded_once_an_addition(trio: RankPool, numel: int) -> None:
    runs = trio.run(sums_of_noise, numel)
    assert runs[1] == runs[0]
    assert runs[2] == runs[0]
    assert runs[0][-1] <= trio.world_size - 1, "more than one rounding an addition"


def averages_of_halves(comm: Communicator) -> list[float]:
    buffer = put(comm, [30_000.0, 1.0], DType.FLOAT16)
    comm.all_reduce(buffer, ReduceOp.AVG)
    return get(comm, buffer).tolist()


def test_an_fp16_average_overflows_where_its_sum_does(trio: RankPool) -> None:
    assert trio.run(averages_of_halves) == [[float("inf"), 1.0]] * 3


STUCK = """
    import sys
    from polyaccel import comm
    from polyaccel.errors import CommTimeout
    import torch
    comm.init_distributed("ccl", timeout=60)
    comm.barrier()
    comm.default_communicator().inner.timeout_s = 8  # the other rank's last report is news by then
    if comm.get_rank() == 0:
        try:
            comm.all_reduce(torch.ones(5))
        except CommTimeout as error:
            print("late:", error.missing_ranks, flush=True)
        sys.exit(7)
    sys.stdin.read()
"""


def test_a_process_ends_with_its_own_code_while_a_call_hangs(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(textwrap.dedent(STUCK))
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outs = [rank.communicate(timeout=60)[0] for rank in ranks]  # rank 1 runs on until its input is closed
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [7, 0], outs
    assert "late: (1,)" in outs[0]
