"""The communicators' contract on a device that has no element type of 64 bits, as JAX's have by default."""

from __future__ import annotations

import pytest

from polyaccel.accelerators.base import Capabilities
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.testkit.comm.contract import messages_arrive_in_order
from polyaccel.testkit.comm.values import dtypes_of, get, put, values_of
from polyaccel.testkit.ranks.threads import run_threads

WIDE = {DType.FLOAT64, DType.INT64}


class Narrow(CpuAccelerator):
    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=frozenset(DType) - WIDE, default_comm="local")

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        assert dtype not in WIDE, f"{dtype} on a device that has none"
        return super().allocate(numel, dtype, pinned=pinned)


def test_numbers_reach_it_and_come_back() -> None:
    def body(comm: Communicator) -> None:
        comm.accelerator = Narrow("torch")
        assert not WIDE & set(dtypes_of(comm))
        for dtype in dtypes_of(comm):
            found = get(comm, put(comm, values_of(comm.rank, 7), dtype))
            assert found.dtype == ("float64" if dtype.is_floating else "int64")
            assert list(found) == list(values_of(comm.rank, 7))
        messages_arrive_in_order(comm)

    run_threads(2, body)


def test_a_device_that_has_them_keeps_what_only_they_can_hold() -> None:
    def body(comm: Communicator) -> None:
        assert list(get(comm, put(comm, [2**40 + 1], DType.INT64))) == [2**40 + 1]
        assert list(get(comm, put(comm, [1 + 2**-40], DType.FLOAT64))) == [pytest.approx(1 + 2**-40, abs=0)]

    run_threads(1, body)
