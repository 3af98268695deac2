"""A rank that does not come, or dies, is named by the others on every backend between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mpi_ranks import needs_mpi

from polyaccel.comm.backends import comm_backend
from polyaccel.comm.base import Communicator
from polyaccel.comm.hierarchical import HierarchicalCommunicator
from polyaccel.comm.hosts import share_hosts
from polyaccel.comm.torch_communicator import TorchCommunicator
from polyaccel.comm.torch_exchange import ExchangeCommunicator
from polyaccel.testkit.comm_faults import CommFaultContract
from polyaccel.testkit.mpi import MpiRankPool
from polyaccel.testkit.procs import RankPool


def needs(name: str) -> pytest.MarkDecorator:
    probe = comm_backend(name).probe()
    return pytest.mark.skipif(not probe.usable, reason=probe.reason)


class TestGloo(CommFaultContract):
    def pool(self, world_size: int, comm_timeout_s: float, grace_s: float) -> RankPool:
        return RankPool(world_size, backend="gloo", comm_timeout_s=comm_timeout_s, grace_s=grace_s)


class TestTorchsOwnCollectives(TestGloo):
    """As nccl, xccl and hccl have them: their errors name nobody, and the recorder does."""

    def run(self, pool: RankPool, body: Callable[..., Any], *args: Any) -> list[Any]:
        return pool.run(by_torch, body, *args)


@needs("shm")
class TestShm(CommFaultContract):
    def pool(self, world_size: int, comm_timeout_s: float, grace_s: float) -> RankPool:
        return RankPool(world_size, backend="shm", comm_timeout_s=comm_timeout_s, grace_s=grace_s)


@needs("shm")
class TestTwoHosts(TestGloo):
    """Shared memory inside hosts, gloo between them: the one that fails is on the other host of half of the ranks."""

    world_size = 4

    def run(self, pool: RankPool, body: Callable[..., Any], *args: Any) -> list[Any]:
        return pool.run(on_two_hosts, body, *args)


@needs("ccl")
class TestCcl(CommFaultContract):
    def pool(self, world_size: int, comm_timeout_s: float, grace_s: float) -> RankPool:
        return RankPool(world_size, backend="ccl", comm_timeout_s=comm_timeout_s, grace_s=grace_s)


@needs_mpi
class TestMpi(CommFaultContract):
    def pool(self, world_size: int, comm_timeout_s: float, grace_s: float) -> RankPool:
        return MpiRankPool(world_size, memory="numpy", comm_timeout_s=comm_timeout_s, grace_s=grace_s)


def by_torch(comm: Communicator, body: Callable[..., Any], *args: Any) -> Any:
    assert isinstance(comm, ExchangeCommunicator)
    return body(TorchCommunicator(comm.group, comm.ranks, comm.accelerator, "gloo", comm.timeout_s), *args)


def on_two_hosts(comm: Communicator, body: Callable[..., Any], *args: Any) -> Any:
    """`body` with ranks that a launcher counted 0, 1, 0, 1 on their hosts."""
    both = share_hosts(comm, comm.rank % 2)
    assert isinstance(both, HierarchicalCommunicator)
    return body(both, *args)


class Nameless(TorchCommunicator):
    def board(self) -> None:
        return None


def nameless(comm: Communicator, body: Callable[..., Any], *args: Any) -> Any:
    assert isinstance(comm, ExchangeCommunicator)
    return body(Nameless(comm.group, comm.ranks, comm.accelerator, "gloo", comm.timeout_s), *args)


def test_a_time_limit_without_a_name_breaks_the_contract() -> None:
    class Suite(TestGloo):
        def run(self, pool: RankPool, body: Callable[..., Any], *args: Any) -> list[Any]:
            return pool.run(nameless, body, *args)

    with pytest.raises(AssertionError, match=r"rank 1 did not come, and rank 0 says that \(\) did not"):
        Suite().test_a_rank_that_does_not_come_is_named()
    with pytest.raises(AssertionError, match="rank 1 was killed, and another one does not say so"):
        Suite().test_a_rank_that_dies_is_named_and_nobody_waits_for_it()
