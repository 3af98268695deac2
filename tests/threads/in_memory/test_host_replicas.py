"""Replicas of ranks on several hosts, each with a keeper of its own: any one host may be lost with all that it kept."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
from parity_models import assert_bitwise, assert_close
from replica_starts import start
from served_keeper import Served

from polyaccel.checkpoint.in_memory import neighbours, replicas, writer
from polyaccel.checkpoint.in_memory.parts import PartKey
from polyaccel.checkpoint.save import neighbor_copies
from polyaccel.errors import CheckpointError
from polyaccel.job.memory_server.client import KeeperClient, KeeperGone
from polyaccel.job.memory_server.start import can_keep

pytestmark = pytest.mark.skipif(not can_keep(), reason="sockets and memory without names are Linux's")
NO_REPLICA: dict[str, Any] = {"checkpoint": {}}


class Keepers:
    """A keeper a host; `of_rank` says on which host each rank of the next start is."""

    def __init__(self, name: str) -> None:
        self._names = (f"{name}-{number}" for number in count())
        self.hosts: dict[int, Served] = {}
        self.of_rank: tuple[int, ...] = ()

    def on(self, *of_rank: int) -> int:
        """The ranks of the next start are on these hosts. Returns how many they are."""
        self.of_rank = of_rank
        for host in of_rank:
            if host not in self.hosts:
                self.hosts[host] = Served(next(self._names))
        return len(of_rank)

    def lose(self, host: int) -> None:
        """The host is gone, with what it kept; another one of that number begins empty."""
        self.hosts.pop(host).close()

    def connect(self, environ: object) -> KeeperClient:
        host = self.of_rank[int(current_thread().name.removeprefix("rank "))]
        if host not in self.hosts:
            raise KeeperGone("the keeper of this host cannot be reached")
        return self.hosts[host].connect()

    def parts(self, host: int) -> set[tuple[int, int]]:
        """(step, rank) of the parts that a host's keeper has."""
        found = (PartKey.parse(name) for name, _ in self.hosts[host].shelf.names("parts/"))
        return {(key.step, key.rank) for key in found if key is not None}

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()


@pytest.fixture
def keepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keepers]:
    found = Keepers(f"hosts-{tmp_path}")
    monkeypatch.setattr(KeeperClient, "from_environment", found.connect)
    monkeypatch.setattr(neighbor_copies, "CHUNK_NBYTES", 4096)  # a part takes several
    monkeypatch.setattr(replicas, "_engines", count())
    yield found
    found.close()


CASES = [
    ((0, 1), 2, 1, {}),
    ((0, 1, 2), 3, 0, {}),
    ((0, 0, 1), 1, 0, {"bf16": {"enabled": True}}),
    ((0, 0, 1), 3, 1, {}),
    ((0, 1, 1), 0, 1, {}),
]


@pytest.mark.parametrize(
    ("hosts", "stage", "lost", "changes"), CASES, ids=[f"ranks on {h}, stage {s}, {x} lost" for h, s, x, _ in CASES]
)
def test_a_host_that_is_lost_with_its_keeper_loses_no_step(
    hosts: tuple[int, ...], stage: int, lost: int, changes: dict[str, Any], keepers: Keepers, tmp_path: Path
) -> None:
    """Nothing was ever on a disk; losses and parameters are those of the run without an interruption, bit for bit."""
    world = keepers.on(*hosts)
    _, whole, parameters = start(world, stage, tmp_path, 6, is_restart=False, **NO_REPLICA, **changes)
    start(world, stage, tmp_path, 3, is_restart=False, **changes)
    assert start(world, stage, tmp_path, 1, **changes)[0] == 3  # every rank was killed, all keepers live
    keepers.lose(lost)
    keepers.on(*hosts)
    began, losses, found = start(world, stage, tmp_path, 2, **changes)
    assert (began, losses) == (4, whole[4:])
    assert_bitwise(found, parameters)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("after", [(1,), (1, 0, 5)], ids=lambda hosts: f"then ranks on {hosts}")
def test_other_hosts_and_world_sizes_go_on(after: tuple[int, ...], keepers: Keepers, tmp_path: Path) -> None:
    """Host 0, 1 and 2 have trained; one of them is enough of which the neighbour is there too."""
    world = keepers.on(0, 1, 1) if len(after) < 3 else keepers.on(0, 1, 2)
    _, whole, parameters = start(world, 2, tmp_path, 5, is_restart=False, **NO_REPLICA)
    start(world, 2, tmp_path, 3, is_restart=False)
    began, losses, found = start(keepers.on(*after), 1, tmp_path, 2)
    assert began == 3
    assert losses == pytest.approx(whole[3:], rel=1e-4)
    assert_close(found, parameters, 1e-4)


def test_each_keeper_has_the_parts_of_its_host_and_of_the_one_before(keepers: Keepers, tmp_path: Path) -> None:
    """Two generations of them at most; and those of the start before are gone once a step is whole."""
    start(keepers.on(0, 0, 1, 2), 2, tmp_path, 5, is_restart=False)
    own = {0: {0, 1}, 1: {2}, 2: {3}}
    for host, ranks in own.items():
        parts = keepers.parts(host)
        assert {rank for step, rank in parts if step == 5} == ranks | own[(host - 1) % 3]
        assert {step for step, _ in parts} == {4, 5}
    start(keepers.on(0, 1), 2, tmp_path, 3)
    assert keepers.parts(0) == keepers.parts(1) == {(step, rank) for step in (7, 8) for rank in (0, 1)}


def test_two_neighbours_that_are_lost_leave_the_disk(
    keepers: Keepers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world = keepers.on(0, 1, 2)
    start(world, 1, tmp_path, 2, is_restart=False, act=lambda engine: engine.save_checkpoint(str(tmp_path), tag="t"))
    keepers.lose(0)
    keepers.lose(1)
    keepers.on(0, 1, 2)
    assert start(world, 1, tmp_path, 0)[0] == 0
    assert "no replica in memory is whole: continuing from 't' on disk: 2 steps are lost" in caplog.text


def spoil(served: Served, rank: int, *, note: bool) -> None:
    """Turn a bit of the newest part that a keeper has of a rank."""
    key = max(key for key, _ in served.shelf.names("parts/") if key.endswith(f"/{rank:06d}"))
    entry = served.shelf.get(key)
    assert entry is not None
    assert entry.memory is not None
    if note:
        served.shelf.put(key, bytes([entry.note[0] ^ 1]) + entry.note[1:], entry.memory)
        return
    (byte,) = os.pread(entry.memory, 1, entry.nbytes - 100)
    os.pwrite(entry.memory, bytes([byte ^ 1]), entry.nbytes - 100)
    os.close(entry.memory)


@pytest.mark.parametrize("note", [True, False], ids=["a note", "a byte"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_damaged_with_one_keeper_comes_from_the_other(
    rank: int, note: bool, keepers: Keepers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = keepers.on(0, 1)
    _, whole, _ = start(world, 1, tmp_path, 4, is_restart=False, **NO_REPLICA)
    start(world, 1, tmp_path, 3, is_restart=False)
    spoil(keepers.hosts[rank], rank, note=note)
    began, losses, _ = start(world, 1, tmp_path, 1)
    assert (began, losses) == (3, whole[3:])
    assert ("is taken from" in caplog.text) is not note


def test_what_is_damaged_everywhere_is_named_and_the_disk_serves(
    keepers: Keepers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = keepers.on(0, 1)
    start(world, 1, tmp_path, 2, is_restart=False, act=lambda engine: engine.save_checkpoint(str(tmp_path), tag="t"))
    for host in keepers.hosts.values():
        spoil(host, 1, note=False)
    assert start(world, 1, tmp_path, 0)[0] == 0
    assert "the replica of step 2 in memory cannot be used" in caplog.text
    assert "rank00001.safetensors" in caplog.text


def test_a_part_that_fails_costs_no_step_but_its_own(
    keepers: Keepers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever part is not made, or not taken by the neighbour: the step before is whole, also without a host."""
    finish, take = writer.ReplicaWriter._finish, neighbours.NeighbourCopies._take
    unmade, untaken = {(2, 1), (5, 0), (6, 1)}, {(4, 0), (6, 0)}

    def fails(self: writer.ReplicaWriter, copy: Any) -> PartKey | None:
        if (copy.key.step, copy.key.rank) in unmade:
            raise CheckpointError("no part of this step")
        return finish(self, copy)

    def refuses(self: neighbours.NeighbourCopies, key: PartKey, whole: Any, taker: Any, *rest: Any) -> bool:
        has_all = take(self, key, whole, taker, *rest)
        return has_all and (key.step, key.rank) not in untaken

    monkeypatch.setattr(writer.ReplicaWriter, "_finish", fails)
    monkeypatch.setattr(neighbours.NeighbourCopies, "_take", refuses)
    world = keepers.on(0, 1)
    _, whole, _ = start(world, 2, tmp_path, 8, is_restart=False, **NO_REPLICA)
    for steps in range(1, 8):
        for host in (0, 1):
            keepers.hosts[host].shelf.drop("")
        start(world, 2, tmp_path, steps, is_restart=False)
        done = [step for step in range(1, steps) if not {(step, 0), (step, 1)} & (unmade | untaken)]
        last = max([*done, *([] if {(steps, 0), (steps, 1)} & unmade else [steps])])
        keepers.lose(steps % 2)
        keepers.on(0, 1)
        began, losses, _ = start(world, 2, tmp_path, 1)
        assert (began, losses) == (last, whole[last : last + 1])


def test_a_rank_takes_no_more_memory_than_it_may(
    keepers: Keepers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own two images would fit, those of its neighbour would not: training goes on without replicas."""
    world = keepers.on(0, 1)
    _, whole, _ = start(world, 1, tmp_path, 3, is_restart=False, **NO_REPLICA)
    start(world, 1, tmp_path, 1, is_restart=False)
    own = max(nbytes for _, nbytes in keepers.hosts[0].shelf.names("parts/"))
    for host in (0, 1):
        keepers.hosts[host].shelf.drop("")
    most = {"in_memory": {"memory": 3 * own}}
    assert start(world, 1, tmp_path, 3, is_restart=False, checkpoint=most)[1] == whole
    assert caplog.text.count("makes no replicas for now: replicas of rank") == 2  # once a rank
    assert keepers.parts(0) <= {(1, 0)}


def test_a_host_without_a_keeper_has_no_replicas_and_the_log_says_so(
    keepers: Keepers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = keepers.on(0, 1)
    keepers.lose(1)
    start(world, 1, tmp_path, 1, is_restart=False)
    assert caplog.text.count('"checkpoint.in_memory" has no effect: ranks [1] have no keeper: the keeper of this') == 1
    assert keepers.parts(0) == set()
