"""Whether MPI takes a device's memory, and what the backend makes of it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from backend_marks import needs

from polyaccel.accelerators.base import NullStream, Stream
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.backends.mpi.backend import MpiBackend
from polyaccel.comm.base import Communicator, Rendezvous
from polyaccel.core.types import DeviceId
from polyaccel.errors import CommError
from polyaccel.testkit.comm.contract import all_reduce_combines_everywhere
from polyaccel.testkit.ranks.mpi import MpiRankPool

pytestmark = needs("mpi")
SWITCH = "MPICH_GPU_SUPPORT_ENABLED"


def what_mpi_says(comm: Communicator) -> None:
    from polyaccel.comm.mpi import library

    for device in ("cuda", "xpu", "npu", "mps"):
        assert not library.takes_memory_of(device, {})  # no wheel is built for devices
    for environ in ({SWITCH: "1"}, {"MV2_USE_CUDA": "1"}, {"MV2_USE_ROCM": "1"}):
        assert library.takes_memory_of("cuda", environ)
        assert not library.takes_memory_of("xpu", environ)
    assert library.takes_memory_of("xpu", {"I_MPI_OFFLOAD": "1"})
    assert not library.takes_memory_of("xpu", {"I_MPI_OFFLOAD": "0"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_QUERIES", {"cuda": ("MPI_Abort",), "rocm": ("no_such_function",), "level_zero": ()})
        patch.setattr(library.ctypes, "CDLL", lambda file: FakeLibrary())
        assert library.takes_memory_of("cuda", {})


class FakeLibrary:
    def MPI_Abort(self) -> int:  # noqa: N802 - a function of MPI
        return 1


def test_mpi_is_asked_in_every_way(mpi_pool: Callable[..., MpiRankPool]) -> None:
    mpi_pool(2).run(what_mpi_says)


class CountingStream(NullStream):
    waits = 0

    def synchronize(self) -> None:
        type(self).waits += 1


class Direct(CpuAccelerator):
    """A device whose memory MPI takes, with a stream that says how often it was waited for."""

    def current_device(self) -> DeviceId:
        return DeviceId("cuda", 0)

    def current_stream(self) -> Stream:
        return CountingStream()


def over_a_device_that_mpi_takes(comm: Communicator) -> int:
    from polyaccel.comm.backends.mpi.communicator import MpiCommunicator

    world = Rendezvous(comm.rank, comm.world_size, comm.rank, comm.world_size, None, None, "this test")
    os.environ[SWITCH] = "1"
    try:
        direct = MpiBackend().connect(world, device := Direct(), timeout_s=20.0)
    finally:
        del os.environ[SWITCH]
    assert type(direct) is MpiCommunicator
    assert direct.accelerator is device
    CountingStream.waits = 0
    checks = all_reduce_combines_everywhere(direct)
    direct.close()
    return checks if CountingStream.waits >= checks / 2 else 0  # empty buffers send nothing


def test_a_device_s_queue_is_waited_for_before_its_memory_is_sent(mpi_pool: Callable[..., MpiRankPool]) -> None:
    assert all(mpi_pool(2).run(over_a_device_that_mpi_takes))


def contradicts_mpi(comm: Communicator) -> str:
    wrong = Rendezvous(1 - comm.rank, 2, 0, 2, None, None, "this test")
    with pytest.raises(CommError) as caught:
        MpiBackend().connect(wrong, CpuAccelerator(), timeout_s=5.0)
    assert caught.value.value == (comm.rank, 2)
    return str(caught.value)


def test_a_rendezvous_that_contradicts_mpi_is_an_error_that_shows_both(mpi_pool: Callable[..., MpiRankPool]) -> None:
    first, second = mpi_pool(2).run(contradicts_mpi)
    assert "has rank 0 of 2, but this test has rank 1 of 2" in first
    assert "has rank 1 of 2, but this test has rank 0 of 2" in second
