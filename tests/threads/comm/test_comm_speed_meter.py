"""Measuring collectives: all ranks get one table, calls are those that are named, and a rank alone is refused."""

from __future__ import annotations

import pytest

from polyaccel.comm.base import Communicator
from polyaccel.comm.benchmark import OPERATIONS, CollectiveTimings, SpeedMeter, all_cases, measured
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.core.types import DType
from polyaccel.errors import CommError
from polyaccel.testkit.ranks.threads import run_threads


def _measured(comm: Communicator) -> CollectiveTimings:
    cases = list(all_cases(OPERATIONS, [1 << 10, 1 << 14]))
    return measured(comm, DType.FLOAT32, cases, rounds=3, budget_s=0.001, ranks_on_hosts=[2, 1])


def test_all_ranks_have_one_table() -> None:
    tables = run_threads(3, _measured)
    assert tables[0] == tables[1] == tables[2]
    assert [(row.operation, row.nbytes) for row in tables[0].rows] == [
        (name, nbytes)
        for name in OPERATIONS
        for nbytes in (1020, 16380)  # equal parts for three ranks
    ]
    assert all(0 < row.fastest_s <= row.seconds for row in tables[0].rows)
    assert (tables[0].world_size, tables[0].dtype, tables[0].accelerator) == (3, "float32", "cpu")


def _called(comm: Communicator, operation: str) -> tuple[float, bytes]:
    """How many elements a call of 12 KiB sends, and what is in the buffer afterwards."""
    recorded = RecordingCommunicator(comm)
    meter = SpeedMeter(recorded, 12 << 10, DType.FLOAT32)
    call = meter._call(operation, meter._whole, meter._other)
    before = recorded.sent_numel
    call()
    return recorded.sent_numel - before, meter._whole.to_bytes()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_is_the_operation_that_is_named(operation: str) -> None:
    numel = (12 << 10) // 4
    expected = {
        "all_reduce": [2 * numel * 3 // 4] * 4,
        "all_gather": [numel * 3 // 4] * 4,
        "reduce_scatter": [numel * 3 // 4] * 4,
        "all_to_all": [numel * 3 // 4] * 4,
        "broadcast": [numel, 0, 0, 0],
        "send_recv": [numel] * 4,
    }
    found = run_threads(4, _called, operation)
    assert [sent for sent, _ in found] == expected[operation]
    if operation != "reduce_scatter":  # in place: all but its part is undefined
        assert {values for _, values in found} == {bytes(12 << 10)}


def test_a_rank_alone_is_refused() -> None:
    with pytest.raises(CommError) as caught:
        run_threads(1, lambda comm: SpeedMeter(comm, 1024, DType.FLOAT32))
    assert caught.value.value == 1
