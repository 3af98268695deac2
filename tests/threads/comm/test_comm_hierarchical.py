"""Two levels keep the contract of communicators, however ranks lie on hosts; and use the network as they should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from pretended_hosts import Hosts, on_hosts

from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.record import FlightRecorder, RecordingCommunicator
from polyaccel.comm.wrappers.hierarchical import HierarchicalCommunicator, is_two_level
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import CommError
from polyaccel.testkit.comm import contract as contract
from polyaccel.testkit.comm.contract import CommContract
from polyaccel.testkit.comm.values import put, values_of
from polyaccel.testkit.ranks.threads import run_threads

SIDE_BY_SIDE = {4: ((0, 1), (2, 3)), 6: ((0, 1), (2, 3), (4, 5))}
ROUND_ROBIN = {4: ((0, 2), (1, 3)), 6: ((0, 3), (1, 4), (2, 5))}
ANYHOW = {4: ((0, 3), (1, 2)), 6: ((0, 5, 2), (1, 3, 4))}


class TestTwoLevels(CommContract):
    world_sizes = (4,)
    hosts: ClassVar[dict[int, Hosts]] = SIDE_BY_SIDE

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return run_threads(world_size, lambda comm: body(on_hosts(comm, self.hosts[world_size]), *args))


class TestTwoLevelsRoundRobin(TestTwoLevels):
    hosts = ROUND_ROBIN


class TestTwoLevelsAnyhow(TestTwoLevels):
    hosts = ANYHOW


@pytest.mark.parametrize("hosts", [SIDE_BY_SIDE[6], ANYHOW[6], ((0, 1, 2), (3, 4, 5))])
@pytest.mark.parametrize(
    "body",
    [
        contract.reduce_scatter_keeps_the_own_part,
        contract.all_gather_puts_parts_side_by_side,
        contract.broadcast_comes_from_any_root,
        contract.deterministic_reductions_agree_bitwise,
        contract.sub_groups_work_beside_their_parent,
    ],
)
def test_six_ranks(body: Callable[[Communicator], int], hosts: Hosts) -> None:
    assert all(run_threads(6, lambda comm: body(on_hosts(comm, hosts))))


@pytest.mark.parametrize("hosts", [SIDE_BY_SIDE[6], ANYHOW[6]])
def test_every_rank_sends_its_share_of_what_crosses_hosts(hosts: Hosts) -> None:
    """Of M elements over H hosts with L ranks each, M/L (H-1)/H leave a rank for another host."""
    numel = 30_000

    def body(comm: Communicator) -> dict[str, float]:
        intra = None
        for members in hosts:
            intra = comm.split(members) or intra
        across = FlightRecorder()
        inter = None
        for place in zip(*hosts, strict=True):
            inter = comm.split(place) or inter
        assert intra is not None
        assert inter is not None
        both = HierarchicalCommunicator(comm, intra, RecordingCommunicator(inter, across, watch_s=None), hosts)
        whole = put(both, values_of(comm.rank, numel), DType.FLOAT32)
        part = both.allocate(numel // 6, DType.FLOAT32)
        both.all_reduce(whole)
        both.reduce_scatter(part, whole)
        both.all_gather(whole, part)
        return dict(across.sent_numel)

    share = numel / len(hosts[0]) * (len(hosts) - 1) / len(hosts)
    wanted = {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share}
    assert run_threads(6, body) == [wanted] * 6


def test_an_average_does_not_overflow_where_the_sum_would() -> None:
    def body(comm: Communicator) -> bytes:
        both = on_hosts(comm, SIDE_BY_SIDE[4])
        large = put(both, [6e4] * 8, DType.FLOAT16)
        both.all_reduce(large, ReduceOp.AVG)
        part = both.allocate(2, DType.FLOAT16)
        both.reduce_scatter(part, large, ReduceOp.AVG)
        return part.to_bytes()

    assert run_threads(4, body) == [put(run_threads(1, lambda comm: comm)[0], [6e4] * 2, DType.FLOAT16).to_bytes()] * 4


def test_groups_are_made_where_their_ranks_are() -> None:
    def body(comm: Communicator) -> list[str | None]:
        both = on_hosts(comm, SIDE_BY_SIDE[6])
        found = [both.split(ranks) for ranks in ([3, 2], [0, 1, 2, 3], [0, 1, 2, 4], [1, 3, 5], [0, 1, 3])]
        return [None if part is None else f"{type(part).__name__} {part.ranks}" for part in found]

    found = run_threads(6, body)
    assert found[0] == [
        None,
        "HierarchicalCommunicator (0, 1, 2, 3)",
        "LocalCommunicator (0, 1, 2, 4)",
        None,
        "LocalCommunicator (0, 1, 3)",
    ]
    assert found[3][0] == "LocalCommunicator (3, 2)"
    assert found[3][3] == "LocalCommunicator (1, 3, 5)"


def test_uneven_hosts_are_refused() -> None:
    def body(comm: Communicator) -> None:
        alone = None
        for rank in range(3):
            alone = comm.split([rank]) or alone
        assert alone is not None
        with pytest.raises(CommError) as caught:
            HierarchicalCommunicator(comm, alone, alone, [(0, 1), (2,)])
        assert caught.value.value == ((0, 1), (2,))
        assert "[2, 1]" in str(caught.value)

    run_threads(3, body)


def test_two_levels_pay_where_every_host_has_several() -> None:
    assert is_two_level(((0, 1), (2, 3)))
    assert not is_two_level(((0, 1, 2),))
    assert not is_two_level(((0,), (1,)))
    assert not is_two_level(((0, 1), (2,)))
