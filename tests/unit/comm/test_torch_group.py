"""Where ranks meet through torch's store: who can reach it, how long anybody waits there, and what is said then."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from polyaccel.comm import host_address, torch_group
from polyaccel.comm.base import Rendezvous
from polyaccel.comm.host_address import listening_socket
from polyaccel.comm.init.setup import init_distributed
from polyaccel.comm.torch_group import join_default_group, own_part
from polyaccel.core.deadline import Deadline
from polyaccel.errors import CommError, CommTimeout
from polyaccel.job.auth import SECRET_VARIABLE, sign
from polyaccel.job.ports import free_port

SHORT_S = 0.3
ENOUGH_S = 5.0
"""Long enough for a rank of a busy machine to make its store."""


def patient() -> Deadline:
    """A limit that begins now: this module is imported long before its tests run."""
    return Deadline(60.0)


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


@pytest.fixture
def mute_server() -> Iterator[int]:
    """A port where somebody takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        yield server.getsockname()[1]


class DictStore:
    """A store of torch's kind, of which the test is the server."""

    def __init__(self, notes: dict[str, bytes] | None = None, fails: Exception | None = None) -> None:
        self.notes = notes or {}
        self.fails = fails

    def set(self, key: str, value: str | bytes) -> None:
        self.notes[key] = value if isinstance(value, bytes) else value.encode()

    def wait(self, keys: list[str], limit: timedelta) -> None:
        if self.fails is not None:
            raise self.fails

    def get(self, key: str) -> bytes:
        return self.notes[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.notes for key in keys)


def meet(rank: int, port: int, deadline: Deadline, **changes: Any) -> None:
    rendezvous = Rendezvous(rank, 2, rank, 2, "127.0.0.1", port, "this test", **changes)
    join_default_group("gloo", rendezvous, deadline, lambda: None)


def test_what_heeds_no_limit_is_left_behind() -> None:
    never = Event()
    with pytest.raises(CommTimeout) as caught:
        Deadline(0.01).run("Godot", never.wait)
    assert caught.value.value == "Godot"
    assert "0.01" in str(caught.value)
    never.set()
    with pytest.raises(ZeroDivisionError):
        patient().run("a result", lambda: 1 // 0)
    assert patient().run("a result", lambda: 7) == 7


def test_a_deadline_counts_from_its_beginning() -> None:
    assert Deadline(5.0, began_s=0.0).is_over
    assert Rendezvous(0, 1, 0, 1, None, None, "x", began_s=0.0).deadline(5.0).is_over
    assert not Rendezvous(0, 1, 0, 1, None, None, "x").deadline(60.0).is_over


@pytest.mark.parametrize("url", [None, "tcp://127.0.0.1:{port}"])
def test_a_store_that_says_nothing_is_given_up_at_the_limit(mute_server: int, url: str | None) -> None:
    with pytest.raises(CommTimeout) as caught:
        meet(1, mute_server, Deadline(SHORT_S), init_method=url and url.format(port=mute_server))
    assert f"rank 1 could not reach the other 1 ranks at tcp://127.0.0.1:{mute_server} (this test)" in str(caught.value)
    assert f"the store of rank 0 at tcp://127.0.0.1:{mute_server}" in caught.value.message.partition("within")[2]


def test_a_store_that_is_not_there_is_given_up_at_the_limit() -> None:
    with pytest.raises(CommTimeout) as caught:
        meet(1, free_port(), Deadline(SHORT_S))
    assert all(part in str(caught.value) for part in ("tcp://127.0.0.1", "rank 1"))


def test_ranks_that_do_not_come_are_named_and_so_are_those_that_did() -> None:
    with pytest.raises(CommTimeout) as caught:
        meet(0, free_port(), Deadline(ENOUGH_S))
    here = f"here is rank 0 (process {os.getpid()} on {socket.gethostname()})"
    assert f"ranks [1] have not come within {ENOUGH_S:g} s; {here}" in caught.value.message
    assert caught.value.missing_ranks == (1,)


def test_a_port_that_is_taken_is_said() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(CommError) as caught,
    ):
        meet(0, other.getsockname()[1], patient())
    assert "rank 0" in str(caught.value)


def test_the_store_is_reached_on_the_loopback_only() -> None:
    port = free_port()
    store = torch_group.open_store(Rendezvous(0, 2, 0, 2, "127.0.0.1", port, "this test"), patient())
    with socket.create_connection(("127.0.0.1", port)):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    del store


@pytest.mark.parametrize(
    ("address", "leads_to", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", {"127.0.0.1"}),
        ("localhost", "127.0.0.1", {"127.0.0.1"}),
        ("node0", "127.0.1.1", {"::", "0.0.0.0"}),  # as Debian's /etc/hosts has it; other hosts know another address
        ("service", "192.0.2.1", {"::", "0.0.0.0"}),
    ],
)
def test_rank_0_listens_where_it_is_met(
    address: str, leads_to: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (leads_to, 0))]
    monkeypatch.setattr(host_address.socket, "getaddrinfo", lambda *_, **__: found)
    with listening_socket(address, 0) as listener:
        assert listener.getsockname()[0] in expected


def test_a_store_that_ends_is_an_error_of_ours() -> None:
    from torch.distributed import DistNetworkError

    class Gone(DictStore):
        def check(self, keys: list[str]) -> bool:
            raise DistNetworkError("Connection reset by peer")

    with pytest.raises(CommError) as caught:
        torch_group._exchange(Gone(fails=DistNetworkError("Broken pipe")), "shm/0", 1, 2, "note", patient())
    assert all(part in str(caught.value) for part in ("(shm/0)", "rank 0"))
    assert not isinstance(caught.value, CommTimeout)


def test_notes_have_the_seal_of_the_job_where_there_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "a secret of this job"
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    good = sign(secret.encode(), "polyaccel/t/0", b"zero")
    store = DictStore({"polyaccel/t/0": good})
    assert torch_group._exchange(store, "t", 1, 2, "one", patient()) == ["zero", "one"]
    for strange in (b"zero", good[:-1] + b"x", sign(secret.encode(), "polyaccel/t/1", b"zero")):
        with pytest.raises(CommError) as caught:
            torch_group._exchange(DictStore({"polyaccel/t/0": strange}), "t", 1, 2, "one", patient())
        assert caught.value.value == (0,)
        assert "ranks [0]" in str(caught.value)


def test_a_stores_file_is_its_users_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    torch_group._own_file(str(mine))
    assert stat.S_IMODE(mine.stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(mine)
    with pytest.raises(OSError) as caught:
        torch_group._own_file(str(tmp_path / "link"))
    assert caught.value.errno == errno.ELOOP
    mine.chmod(0o666)
    with pytest.raises(CommError) as caught:
        torch_group._own_file(str(mine))
    assert caught.value.value == str(mine)
    assert "666" in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of others")
def test_a_stores_file_of_another_user_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.touch(0o600)
    os.chown(theirs, 12345, 12345)
    with pytest.raises(CommError) as caught:
        torch_group._own_file(str(theirs))
    assert caught.value.value == str(theirs)
    assert "user 12345" in str(caught.value)


@pytest.mark.parametrize("timeout", [0, -1, 1e308, float("nan"), float("inf")])
def test_a_limit_that_no_clock_counts_is_refused(timeout: float) -> None:
    with pytest.raises(CommError) as caught:
        init_distributed(timeout=timeout)
    assert caught.value.value is timeout


def _parts_of(store: Any, world_size: int) -> list[Any]:
    def part(rank: int) -> Any:
        own = own_part(store, rank, world_size, Deadline(30))
        own.set(f"address/{rank}", f"{id(own)}")
        return own

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(part, reversed(range(world_size))))


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3, 3), (3, 2), (1, 4)], ids=str)
def test_a_start_sees_nothing_of_the_starts_before_it(sizes: tuple[int, ...]) -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    for size in sizes:
        parts = _parts_of(store, size)
        written = {rank: parts[0].get(f"address/{rank}") for rank in range(size)}
        assert all(part.get(f"address/{rank}") == written[rank] for part in parts for rank in range(size))
        assert len(set(written.values())) == size
        assert not parts[0].check([f"address/{size}"])


def test_a_rank_that_died_while_it_asked_is_not_taken_for_its_successor() -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    store.set("polyaccel/start/ask/1", "of the dead")
    first, second = _parts_of(store, 2)
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_rank_0_does_not_wait_for_ever_for_who_never_comes() -> None:
    import torch.distributed as dist

    own_part(dist.HashStore(), 0, 2, Deadline(0.05)).set("here", "0")
