"""What ranks say through MPI before they have met, with MPI played: who is verified, heard and answered."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest

from polyaccel.comm.discovery import discover
from polyaccel.comm.mpi import rendezvous as mpi_meeting
from polyaccel.comm.mpi.rendezvous import Answer, Note
from polyaccel.core import tagged_json
from polyaccel.errors import CommError, CommTimeout


class Message:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def Recv(self, where: list[Any]) -> None:  # noqa: N802 - MPI's name
        where[0][:] = self.data


class Status:
    source = -1
    nbytes = 0

    def Get_count(self, kind: object) -> int:  # noqa: N802 - MPI's name
        return self.nbytes

    def Get_source(self) -> int:  # noqa: N802 - MPI's name
        return self.source


class World:
    """MPI.COMM_WORLD, and what stands in for the module and `mpi_library`: messages are there from the beginning."""

    ANY_SOURCE = -1
    BYTE = object()
    Status = Status

    def __init__(self, rank: int, size: int, inbox: dict[int, Any]) -> None:
        self.rank, self.size, self.inbox = rank, size, inbox
        self.sent: dict[int, Any] = {}
        self.COMM_WORLD = self

    def Get_processor_name(self) -> str:  # noqa: N802 - MPI's name
        return "here"

    def name(self) -> str:
        return "An MPI v1"

    def Send(self, message: list[Any], dest: int, tag: int) -> None:  # noqa: N802 - MPI's name
        self.sent[dest] = (Note if dest == 0 else Answer)(*tagged_json.from_bytes(message[0]))

    def Improbe(self, source: int, tag: int, status: Status) -> Message | None:  # noqa: N802 - MPI's name
        if not self.inbox:
            return None
        status.source, message = self.inbox.popitem()
        data = tagged_json.to_bytes(astuple(message), "the message")
        status.nbytes = len(data)
        return Message(data)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    def play(world: World) -> World:
        monkeypatch.setattr(mpi_meeting, "why_not", lambda: "")
        monkeypatch.setattr(mpi_meeting, "_start", lambda here: (world, world))
        monkeypatch.setattr(mpi_meeting.host_address, "own_addresses", lambda: ("10.0.0.1",))
        return world

    return play


def launched(rank: int, size: int) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}


HERE = Note("here", ("10.0.0.1",), None, None)


def test_rank_0_hears_all_and_tells_all_the_same(play: Any) -> None:
    world = play(World(0, 3, {1: HERE, 2: HERE}))
    found = discover(environ=launched(0, 3))
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (0, 3, 0, 3)
    assert found.address == "127.0.0.1"
    assert world.sent == {rank: Answer("127.0.0.1", found.port or 0, rank, 3) for rank in (1, 2)}


def test_the_others_say_what_they_know_and_do_what_they_are_told(play: Any) -> None:
    world = play(World(1, 2, {0: Answer("10.0.0.9", 1234, 1, 2)}))
    found = discover(environ=launched(1, 2) | {"MASTER_PORT": "1234"})
    assert (found.rank, found.local_rank, found.address, found.port) == (1, 1, "10.0.0.9", 1234)
    assert world.sent == {0: Note("here", ("10.0.0.1",), None, "1234")}


def test_a_rank_of_pmix_alone_learns_from_mpi_how_many_there_are(play: Any) -> None:
    play(World(1, 2, {0: Answer("10.0.0.9", 1234, 0, 1)}))
    found = discover(environ={"PMIX_RANK": "1"})
    assert (found.world_size, found.local_rank, found.local_world_size, found.source) == (2, 0, 1, "PMIx")


@pytest.mark.parametrize("world", [(0, 1), (0, 2), (1, 3)])
def test_an_mpi_that_contradicts_its_launcher_is_an_error_that_shows_both(world: tuple[int, int], play: Any) -> None:
    play(World(*world, {}))
    with pytest.raises(CommError) as caught:
        discover(environ=launched(1, 2))
    assert "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2" in str(caught.value)
    assert f"MPI.COMM_WORLD of An MPI v1 has rank {world[0]} of {world[1]}" in str(caught.value)


@pytest.mark.parametrize(("rank", "missing"), [(0, (2, 3)), (1, (0,))])
def test_ranks_that_are_not_heard_of_are_named(rank: int, missing: tuple[int, ...], play: Any) -> None:
    play(World(rank, 4, {1: HERE} if rank == 0 else {}))
    with pytest.raises(CommTimeout) as caught:
        discover(environ=launched(rank, 4), timeout_s=0.01)
    assert caught.value.missing_ranks == missing
    assert f"received nothing from ranks {list(missing)} over MPI within 0.01 s" in str(caught.value)


def test_what_rank_0_cannot_decide_is_the_same_error_everywhere(play: Any) -> None:
    elsewhere = Note("here", ("10.0.0.1",), "elsewhere", None)
    world = play(World(0, 2, {1: elsewhere}))
    with pytest.raises(CommError) as caught:
        discover(environ=launched(0, 2))
    assert str(caught.value).startswith(world.sent[1].problem)
    assert "MASTER_ADDR=elsewhere" in world.sent[1].problem
    play(World(1, 2, {0: world.sent[1]}))
    with pytest.raises(CommError) as caught:
        discover(environ=launched(1, 2) | {"MASTER_ADDR": "elsewhere"})
    assert str(caught.value).startswith(world.sent[1].problem)
