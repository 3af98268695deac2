"""Which ranks share a host, however they are numbered, and that groups of a job keep it."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.base import Communicator
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator
from polyaccel.comm.init.hosts import find_hosts
from polyaccel.job import host_topology
from polyaccel.job.host_topology import HostTopology, group_ranks
from polyaccel.testkit.ranks.threads import run_threads


@pytest.mark.parametrize(
    ("notes", "ranks_by_host", "host_ids"),
    [
        ([("a", 0)], ((0,),), ("a",)),
        ([("a", 0), ("a", 1), ("b", 0), ("b", 1)], ((0, 1), (2, 3)), ("a", "b")),
        ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], ((0, 2), (1, 3)), ("a", "b")),
        ([("b", 0), ("a", 0), ("b", 1), ("b", 2)], ((0, 2, 3), (1,)), ("b", "a")),
        ([("a", 0), ("a", 1), ("a", 0), ("a", 1)], ((0, 1), (2, 3)), ("a", "a")),
        ([("a", 0), ("a", 0), ("a", 1), ("b", 0)], ((0, 2), (1,), (3,)), ("a", "a", "b")),
        ([("a", 0), ("a", 1), ("b", 2), ("b", 3)], ((0, 1), (2, 3)), ("a", "b")),  # no LOCAL_RANK: they are ranks
    ],
)
def test_ranks_are_sorted_by_host_and_by_how_often_a_launcher_counts_from_0(
    notes: list[tuple[str, int]], ranks_by_host: tuple[tuple[int, ...], ...], host_ids: tuple[str, ...]
) -> None:
    for rank in range(len(notes)):
        found = HostTopology.of_notes(rank, notes)
        assert (found.ranks_by_host, found.host_ids) == (ranks_by_host, host_ids)
        assert found.num_hosts == len(ranks_by_host)
        assert found.local_ranks[found.local_rank] == rank
        assert found.local_size == len(found.local_ranks)
        assert found.id_by_rank() == {other: note[0] for other, note in enumerate(notes)}


def test_ranks_of_one_key_are_a_group() -> None:
    assert group_ranks([]) == ()
    assert group_ranks([2, None, 2, "x"]) == ((0, 2), (1,), (3,))


def test_groups_have_the_topology_of_their_job() -> None:
    def body(communicator: Communicator) -> None:
        recorded = RecordingCommunicator(communicator, watch_s=None)
        recorded.host_topology = found = find_hosts(communicator, communicator.rank // 2)
        assert found.ranks_by_host == ((0, 2), (1, 3))
        for group in (recorded.split([1, 2]), recorded.split([0, 3])):
            assert group is None or group.host_topology is found

    run_threads(4, body)


def test_ranks_that_never_asked_are_taken_to_share_a_host_without_a_name() -> None:
    alone = SingleCommunicator(CpuAccelerator("numpy"), timeout_s=1.0, global_rank=3)
    assert alone.host_topology == HostTopology(3, ((3,),), ("",))


def test_hosts_of_other_systems_are_told_apart_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_topology, "_BOOT_ID", Path("/nowhere"))
    assert run_threads(2, lambda communicator: find_hosts(communicator, communicator.rank).num_hosts) == [1, 1]
