"""A rank that does not come, or dies, is named by the others on every backend between processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from backend_marks import needs

from polyaccel.comm.backends.torch.communicator import TorchCommunicator
from polyaccel.comm.backends.torch.exchange import ExchangeCommunicator
from polyaccel.comm.base import Communicator
from polyaccel.comm.collective import Collective, Operation
from polyaccel.comm.init.hosts import find_hosts, make_hierarchical
from polyaccel.comm.work import Work
from polyaccel.comm.wrappers.hierarchical import HierarchicalCommunicator
from polyaccel.comm.wrappers.wrapped import WrappedCommunicator
from polyaccel.testkit.comm.faults import CommFaultContract
from polyaccel.testkit.ranks.mpi import MpiRankPool
from polyaccel.testkit.ranks.procs import RankPool

AT_ONCE = 3
"""Pools of ranks: most of their time is waiting for a limit, and more would be too many processes for two cores."""


class Gloo(CommFaultContract):
    def pool(self, world_size: int, comm_timeout_s: float, grace_s: float) -> RankPool:
        return RankPool(world_size, backend="gloo", comm_timeout_s=comm_timeout_s, grace_s=grace_s)


class TorchsOwnCollectives(Gloo):
    """As nccl, xccl and hccl have them: their errors name nobody, and the recorder does."""

    def run(self, pool: RankPool, body: Callable[..., Any], *args: Any) -> list[Any]:
        return pool.run(by_torch, body, *args)


class Shm(CommFaultContract):
    def pool(self, world_size: int, comm_timeout_s: float, grace_s: float) -> RankPool:
        return RankPool(world_size, backend="shm", comm_timeout_s=comm_timeout_s, grace_s=grace_s)


class TwoHosts(Gloo):
    """Shared memory inside hosts, gloo between them: the one that fails is on the other host of half of the ranks."""

    world_size = 4

    def run(self, pool: RankPool, body: Callable[..., Any], *args: Any) -> list[Any]:
        return pool.run(on_two_hosts, body, *args)


class PassedOn(TwoHosts):
    """As `TwoHosts`, in an all-to-all whose parts are passed on."""

    def run(self, pool: RankPool, body: Callable[..., Any], *args: Any) -> list[Any]:
        return pool.run(passing_on, body, *args)


class Ccl(CommFaultContract):
    def pool(self, world_size: int, comm_timeout_s: float, grace_s: float) -> RankPool:
        return RankPool(world_size, backend="ccl", comm_timeout_s=comm_timeout_s, grace_s=grace_s)


class Mpi(CommFaultContract):
    def pool(self, world_size: int, comm_timeout_s: float, grace_s: float) -> RankPool:
        return MpiRankPool(world_size, memory="numpy", comm_timeout_s=comm_timeout_s, grace_s=grace_s)


def by_torch(comm: Communicator, body: Callable[..., Any], *args: Any) -> Any:
    assert isinstance(comm, ExchangeCommunicator)
    return body(TorchCommunicator(comm.group, comm.ranks, comm.accelerator, "gloo", comm.timeout_s), *args)


def on_two_hosts(comm: Communicator, body: Callable[..., Any], *args: Any) -> Any:
    """`body` with ranks that a launcher counted 0, 1, 0, 1 on their hosts."""
    both = make_hierarchical(comm, find_hosts(comm, comm.rank % 2))
    assert isinstance(both, HierarchicalCommunicator)
    return body(both, *args)


class Exchanging(WrappedCommunicator):
    """What calls itself an all-reduce is an all-to-all of short parts."""

    def start(self, collective: Collective) -> Work:
        if collective.operation is not Operation.ALL_REDUCE:
            return self.inner.call(collective)
        source = collective.buffer_sent()
        call = collective.on(source, self.allocate(source.numel, source.dtype))
        call.operation = Operation.ALL_TO_ALL
        return self.inner.call(call)

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        return self.inner.split(ranks)


def passing_on(comm: Communicator, body: Callable[..., Any], *args: Any) -> Any:
    return on_two_hosts(comm, lambda both: body(Exchanging(both), *args))


class Nameless(TorchCommunicator):
    def board(self) -> None:
        return None


def nameless(comm: Communicator, body: Callable[..., Any], *args: Any) -> Any:
    assert isinstance(comm, ExchangeCommunicator)
    return body(Nameless(comm.group, comm.ranks, comm.accelerator, "gloo", comm.timeout_s), *args)


class NamesNobody(Gloo):
    def run(self, pool: RankPool, body: Callable[..., Any], *args: Any) -> list[Any]:
        return pool.run(nameless, body, *args)


SUITES: dict[str, type[CommFaultContract]] = {
    suite.__name__: suite for suite in (Gloo, TorchsOwnCollectives, Shm, TwoHosts, PassedOn, Ccl, Mpi, NamesNobody)
}
HEALTHY = [
    "Gloo",
    "TorchsOwnCollectives",
    pytest.param("Shm", marks=needs("shm")),
    pytest.param("TwoHosts", marks=needs("shm")),
    pytest.param("PassedOn", marks=needs("shm")),
    pytest.param("Ccl", marks=needs("ccl")),
    pytest.param("Mpi", marks=needs("mpi")),
]
STAYS_AWAY, DIES = "test_a_rank_that_does_not_come_is_named", "test_a_rank_that_dies_is_named_and_nobody_waits_for_it"


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Future[None]]]:
    """Of each suite's tests that are to be run here how they ended; some run at a time."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    used = [item.callspec.params for item in items if "outcomes" in item.fixturenames and not _is_skipped(item)]
    wanted = dict.fromkeys((params["suite"], params["test"]) for params in used)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {(suite, test): pool.submit(getattr(SUITES[suite](), test)) for suite, test in wanted}


def _is_skipped(item: pytest.Function) -> bool:
    return any(mark.args[0] for mark in item.iter_markers("skipif"))


def test_every_test_of_the_contract_is_run() -> None:
    assert {name for name in dir(CommFaultContract) if name.startswith("test_")} == {STAYS_AWAY, DIES}


@pytest.mark.parametrize("test", [STAYS_AWAY, DIES])
@pytest.mark.parametrize("suite", HEALTHY)
def test_a_backend_keeps_the_contract(outcomes: dict[tuple[str, str], Future[None]], suite: str, test: str) -> None:
    outcomes[suite, test].result()


@pytest.mark.parametrize(
    ("suite", "test", "named"),
    [
        ("NamesNobody", STAYS_AWAY, "rank 0"),
        ("NamesNobody", DIES, "rank 1"),
    ],
)
def test_a_time_limit_without_a_name_breaks_the_contract(
    outcomes: dict[tuple[str, str], Future[None]], suite: str, test: str, named: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        outcomes[suite, test].result()
    assert named in str(caught.value)
