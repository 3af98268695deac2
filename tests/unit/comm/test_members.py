"""Members of a job connect to each other and to nobody else, and agree on a token that a stranger does not know."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from polyaccel.comm.rendezvous import sockets
from polyaccel.comm.rendezvous.ranks import RendezvousGroup
from polyaccel.comm.rendezvous.sockets import connect_mesh
from polyaccel.core.deadline import Deadline
from polyaccel.errors import CommError, CommTimeout
from polyaccel.job import auth

pytestmark = pytest.mark.timeout(120)


class Table:
    """Where ranks that are threads lay down their notes. `seen` is called with each round's, before anybody goes on."""

    def __init__(self, world_size: int, seen: Callable[[list[Any]], None] = lambda notes: None) -> None:
        self.world_size = world_size
        self.notes: list[Any] = [None] * world_size
        self.laid = Barrier(world_size, lambda: seen(self.notes))
        self.taken = Barrier(world_size)


class ThreadMembers(RendezvousGroup):
    def __init__(self, rank: int, table: Table, limit_s: float = 60.0) -> None:
        self.rank, self.world_size, self.deadline = rank, table.world_size, Deadline(limit_s)
        self.meeting_host, self._table = "127.0.0.1", table

    def exchange(self, value: Any) -> list[Any]:
        self._table.notes[self.rank] = value
        self._table.laid.wait()
        found = list(self._table.notes)
        self._table.taken.wait()
        return found


def run(table: Table, body: Callable[[ThreadMembers], Any], limit_s: float = 60.0) -> list[Any]:
    """What `body` returns or raises on each rank."""

    def guarded(rank: int) -> Any:
        try:
            return body(ThreadMembers(rank, table, limit_s))
        except CommError as error:
            return error

    with ThreadPoolExecutor(table.world_size) as threads:
        return list(threads.map(guarded, range(table.world_size)))


def exchange_ranks(members: ThreadMembers) -> dict[int, int]:
    """What every peer says of itself over its connection."""
    connected = connect_mesh(members)
    for connection in connected.values():
        connection.sendall(bytes([members.rank]))
    heard = {peer: connection.recv(1)[0] for peer, connection in connected.items()}
    for connection in connected.values():
        connection.close()
    return heard


def doors_of(notes: list[Any]) -> list[tuple[str, int]]:
    """The places in a round of notes that tells them."""
    return [(note[0], note[1]) for note in notes if isinstance(note, list) and len(note) == 3]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_two_members_are_connected(world_size: int) -> None:
    expected = [{peer: peer for peer in range(world_size) if peer != rank} for rank in range(world_size)]
    assert run(Table(world_size), exchange_ranks) == expected


def test_ranks_of_one_host_listen_on_the_loopback_only() -> None:
    places: list[tuple[str, int]] = []
    run(Table(2, lambda notes: places.extend(doors_of(notes))), exchange_ranks)
    assert [address for address, _ in places] == ["127.0.0.1", "127.0.0.1"]


def test_ranks_of_several_hosts_listen_where_the_others_reach_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["here", "there"])
    monkeypatch.setattr(sockets, "_network", lambda: next(names))
    monkeypatch.setattr(sockets, "address_facing", lambda host: "127.0.0.1")  # as a name in /etc/hosts may lead there
    monkeypatch.setattr(sockets, "own_addresses", lambda: ("127.0.0.2",))
    places: list[tuple[str, int]] = []
    assert run(Table(2, lambda notes: places.extend(doors_of(notes))), exchange_ranks) == [{1: 1}, {0: 0}]
    assert {address for address, _ in places} == {"127.0.0.2"}


@pytest.mark.parametrize("says", ["nothing", "something", "another token", "and goes"])
def test_a_stranger_is_let_go_and_keeps_nobody_waiting(says: str) -> None:
    strangers: list[socket.socket] = []

    def come(notes: list[Any]) -> None:
        """Strangers call every rank before any member does."""
        for address, port in doors_of(notes):
            stranger = socket.create_connection((address, port))
            strangers.append(stranger)
            if says == "something":
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: an.example.of.somebody.else\r\n\r\n")
            elif says == "another token":
                marks = [sockets._Endpoint(*note) for note in notes]
                stranger.sendall(sockets._hello(b"?" * 32, marks, len(notes) - 1, 0))
            elif says == "and goes":
                stranger.close()

    assert run(Table(3, come), exchange_ranks) == [{1: 1, 2: 2}, {0: 0, 2: 2}, {0: 0, 1: 1}]
    assert len(strangers) == 3
    for stranger in strangers:
        stranger.close()


def test_who_does_not_connect_is_named() -> None:
    def body(members: ThreadMembers) -> Any:
        if members.rank == 0:
            return connect_mesh(members)
        members.agree_on_token()
        members.exchange(sockets._network())
        return members.exchange(["127.0.0.1", 1, "mark"])

    error, _ = run(Table(2), body, limit_s=0.2)
    assert isinstance(error, CommTimeout), error
    assert error.missing_ranks == (1,)
    assert "did not connect" in error.message


def test_a_member_that_has_ended_is_named() -> None:
    def body(members: ThreadMembers) -> Any:
        if members.rank == 1:
            return connect_mesh(members)
        members.agree_on_token()
        members.exchange(sockets._network())
        with socket.create_server(("127.0.0.1", 0)) as ended:
            port = ended.getsockname()[1]
        return members.exchange(["127.0.0.1", port, "mark"])

    _, error = run(Table(2), body)
    assert isinstance(error, CommError)
    assert error.missing_ranks == (0,)


@pytest.mark.parametrize("secret", ["", "a secret that all ranks of this job have"])
def test_the_token_is_one_for_all_and_new_each_time(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(auth.SECRET_VARIABLE, secret)
    told: list[Any] = []
    tokens = run(Table(3, lambda notes: told.extend(notes)), lambda members: members.agree_on_token())
    others = run(Table(3), lambda members: members.agree_on_token())
    assert len(set(tokens)) == len(set(others)) == 1
    assert tokens[0] != others[0]
    assert len(tokens[0]) == 32
    assert tokens[0].hex() not in str(told)
