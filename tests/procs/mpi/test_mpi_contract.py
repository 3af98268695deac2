"""mpi keeps the contract of communicators under a real mpirun, with and without torch, and over staged buffers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from backend_marks import needs
from far_device import FarDevice

from polyaccel.accelerators.memory.host import HostArrays
from polyaccel.comm.backends.mpi.backend import MpiBackend
from polyaccel.comm.base import Communicator, Rendezvous
from polyaccel.comm.wrappers.staged import StagedCommunicator
from polyaccel.testkit.comm.contract import (
    CommContract,
    all_gather_puts_parts_side_by_side,
    all_reduce_combines_everywhere,
)
from polyaccel.testkit.ranks.mpi import MpiRankPool

pytestmark = needs("mpi")


class OverMpi(CommContract):
    memory: ClassVar[HostArrays] = "torch"

    @pytest.fixture(autouse=True)
    def _pool(self, mpi_pool: Callable[..., MpiRankPool]) -> None:
        self.pool = mpi_pool

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pool(world_size, self.memory).run(body, *args)


class TestMpi(OverMpi):
    world_sizes: ClassVar[tuple[int, ...]] = (1, 2, 3)


class TestMpiWithoutTorch(OverMpi):
    world_sizes: ClassVar[tuple[int, ...]] = (4,)
    memory: ClassVar[HostArrays] = "numpy"

    def test_torch_is_not_loaded(self) -> None:
        self.check(torch_is_not_loaded)


class TestMpiStaged(OverMpi):
    """Over a device whose memory MPI does not reach."""

    world_sizes: ClassVar[tuple[int, ...]] = (2,)

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return super().run(world_size, staged, body, *args)


def torch_is_not_loaded(comm: Communicator) -> int:
    assert "torch" not in sys.modules
    return 1


def staged(comm: Communicator, body: Callable[..., Any], *args: Any) -> Any:
    world = Rendezvous(comm.rank, comm.world_size, comm.rank, comm.world_size, None, None, "this test")
    far = MpiBackend().connect(world, FarDevice(), timeout_s=20.0)
    assert isinstance(far, StagedCommunicator)
    try:
        return body(far, *args)
    finally:
        far.close()


def messages_of_several_pieces(comm: Communicator) -> int:
    """As those of more than a GiB are."""
    from polyaccel.comm.backends.mpi import communicator as mpi_communicator

    before, mpi_communicator._MOST_NBYTES = mpi_communicator._MOST_NBYTES, 1000
    try:
        checks = all_reduce_combines_everywhere(comm) + all_gather_puts_parts_side_by_side(comm)
    finally:
        mpi_communicator._MOST_NBYTES = before
    return checks


def test_large_messages_are_cut(mpi_pool: Callable[..., MpiRankPool]) -> None:
    assert all(mpi_pool(2).run(messages_of_several_pieces))
