"""The keeper keeps what this job's ranks give it, up to its bound, and answers nobody else."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
from served_keeper import SECRET, Served

from polyaccel.checkpoint.in_memory.storage import KeptStorage
from polyaccel.errors import CheckpointError
from polyaccel.job.memory_server import process, protocol
from polyaccel.job.memory_server.client import KeeperClient, KeeperGone
from polyaccel.job.memory_server.process import listen
from polyaccel.job.memory_server.protocol import address_of, authenticate_client, greet_as_keeper, seal_length
from polyaccel.job.memory_server.start import KeeperProcess, can_keep
from polyaccel.testkit.storage import StorageContract

pytestmark = pytest.mark.skipif(not can_keep(), reason="sockets and memory without names are Linux's")
LIMIT_NBYTES = 256 << 20


def memory_of(data: bytes, *, nbytes: int | None = None, sealed: bool = True) -> int:
    """Memory without a name that holds `data`, and zeros up to `nbytes`."""
    memory = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(memory, data)
    os.truncate(memory, nbytes or len(data))
    if sealed:
        seal_length(memory)
    return memory


def contents(client: KeeperClient, key: str) -> tuple[bytes, bytes | None]:
    kept = client.get(key)
    assert kept is not None
    if kept.memory is None:
        return kept.note, None
    try:
        return kept.note, os.pread(kept.memory, 1 << 20, 0)
    finally:
        os.close(kept.memory)


def has_ended(peer: socket.socket) -> bool:
    """Whether the other side hangs up without an answer."""
    peer.settimeout(60)
    with peer:
        try:
            return peer.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Served]:
    served = Served(f"test-{tmp_path}", LIMIT_NBYTES)
    yield served
    served.close()


class TestKeptStorage(StorageContract):
    """What it holds is a checkpoint like any other, so it is a storage like any other."""

    @pytest.fixture(autouse=True)
    def _keeper(self, keeper: Served) -> Iterator[None]:
        self.client = keeper.connect()
        yield
        self.client.close()

    def make(self) -> KeptStorage:
        return KeptStorage(self.client, "files/of a test")


def test_notes_and_memory_come_back(keeper: Served) -> None:
    one, other = keeper.connect(), keeper.connect()
    memory = memory_of(b"values")
    one.put("parts/7/0", b"note", memory)
    os.close(memory)
    one.put("parts/7/1", b"alone")
    assert contents(other, "parts/7/0") == (b"note", b"values")
    assert contents(other, "parts/7/1") == (b"alone", None)
    assert other.get("parts/7") is None
    assert other.names("parts/") == {"parts/7/0": 6, "parts/7/1": 0}
    assert other.names("parts/7/1") == {"parts/7/1": 0}
    assert one.drop("parts/7/0") == 1
    assert other.names("") == {"parts/7/1": 0}
    one.close()
    assert contents(other, "parts/7/1") == (b"alone", None)  # whoever put it may end
    other.close()


def test_memory_is_bounded(keeper: Served) -> None:
    """Notes count as memory does; what was there stays, and memory under two keys counts once."""
    client = keeper.connect()
    half = memory_of(b"", nbytes=LIMIT_NBYTES // 2)
    client.put("one", b"", half)
    client.put("one again", b"", half)
    with pytest.raises(CheckpointError) as caught:
        client.put("two", bytes(LIMIT_NBYTES // 2 + 1))
    assert caught.value.value == "two"
    assert "268,435,456" in str(caught.value)
    other = memory_of(b"", nbytes=LIMIT_NBYTES // 2 + 1)
    with pytest.raises(CheckpointError) as caught:
        client.put("one", b"", other)
    assert caught.value.value == "one"
    assert client.names("") == {"one": LIMIT_NBYTES // 2, "one again": LIMIT_NBYTES // 2}
    client.drop("one again")
    client.put("one", b"", other)  # in the place of the half
    for memory in (half, other):
        os.close(memory)
    client.close()


@pytest.mark.parametrize("kind", ["not sealed", "a file", "a pipe"])
def test_only_memory_whose_length_is_sealed_is_kept(keeper: Served, kind: str, tmp_path: Path) -> None:
    """Anything else could grow past the bound, or end under its reader."""
    client = keeper.connect()
    files = {
        "not sealed": lambda: [memory_of(b"1", sealed=False)],
        "a file": lambda: [os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)],
        "a pipe": lambda: list(os.pipe()),
    }[kind]()
    with pytest.raises(CheckpointError) as caught:
        client.put("one", b"", files[0])
    assert caught.value.value == "one"
    for each in files:
        os.close(each)
    assert client.names("") == {}
    client.close()


@pytest.mark.parametrize("key", ["", "x" * 513])
def test_a_key_that_is_none_is_refused(keeper: Served, key: str) -> None:
    client = keeper.connect()
    with pytest.raises(CheckpointError) as caught:
        client.put(key)
    assert caught.value.value == key
    client.close()


def test_a_wrong_secret_is_refused(keeper: Served) -> None:
    """The keeper's proof is wrong already, so the rank sends nothing; and a rank's proof is looked at before a word."""
    with pytest.raises(KeeperGone) as caught:
        keeper.connect(b"another secret of 16")
    assert caught.value.value == keeper.name
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(address_of(keeper.name))
    stranger.sendall(bytes(32))
    stranger.recv(64, socket.MSG_WAITALL)
    stranger.sendall(bytes(32))  # no proof
    assert has_ended(stranger)


def test_a_process_that_has_taken_the_name_gets_no_memory(tmp_path: Path) -> None:
    """It knows no secret: the rank hands over nothing."""
    listener = listen(f"taken-{tmp_path}")
    heard: list[bytes] = []

    def pose() -> None:
        connection, _ = listener.accept()
        heard.append(connection.recv(32))
        connection.sendall(bytes(64))
        heard.append(connection.recv(1))
        connection.close()

    thread = Thread(target=pose)
    thread.start()
    with pytest.raises(KeeperGone) as caught:
        KeeperClient(f"taken-{tmp_path}", SECRET)
    assert caught.value.value == f"taken-{tmp_path}"
    thread.join(30)
    listener.close()
    assert heard[1] == b""


@pytest.mark.parametrize("side", ["of the keeper", "of a rank"])
def test_another_users_process_is_refused(keeper: Served, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if side == "of a rank":
        monkeypatch.setattr(protocol, "is_own_user", lambda connection: False)
        with pytest.raises(KeeperGone) as caught:
            keeper.connect()
        assert caught.value.value == keeper.name
    else:
        monkeypatch.setattr(process, "is_own_user", lambda connection: False)
        with pytest.raises(KeeperGone):
            keeper.connect()


FORGED = {
    "a head too long": struct.pack("<IQ", 1 << 31, 0),
    "a note too long": struct.pack("<IQ", 2, 1 << 40) + b"{}",
    "no JSON": struct.pack("<IQ", 3, 0) + b"}}}",
    "deep JSON": struct.pack("<IQ", 100_000, 0) + b"[" * 100_000,
    "no object": struct.pack("<IQ", 2, 0) + b"[]",
    "half a message": struct.pack("<IQ", 100, 5) + b"{",
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_message_ends_the_connection_and_nothing_else(keeper: Served, forged: str) -> None:
    client = keeper.connect()
    client.put("kept", b"1")
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(address_of(keeper.name))
    authenticate_client(peer, SECRET)
    with suppress(OSError):  # it may have hung up before the end
        peer.sendall(FORGED[forged])
        peer.shutdown(socket.SHUT_WR)
    assert has_ended(peer)
    assert contents(client, "kept") == (b"1", None)
    client.close()


@pytest.mark.parametrize(
    "head", [{}, {"do": "put"}, {"do": "eat", "key": "a"}, {"do": "get", "key": 3}], ids=json.dumps
)
def test_a_request_that_is_none_is_refused_by_name(keeper: Served, head: dict[str, object]) -> None:
    client = keeper.connect()
    with pytest.raises(CheckpointError):
        client._ask({"key": None, **head})
    assert client.names("") == {}  # the connection lives
    client.close()


def test_more_than_one_open_file_is_refused(keeper: Served) -> None:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(address_of(keeper.name))
    authenticate_client(peer, SECRET)
    files = [memory_of(b"1"), memory_of(b"2")]
    socket.send_fds(peer, [struct.pack("<IQ", 2, 0)], files)
    with suppress(OSError):
        peer.sendall(b"{}")
    assert has_ended(peer)
    for each in files:
        os.close(each)


def test_an_end_in_the_middle_of_a_greeting_is_told(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(bytes(10))
    ours.close()
    with pytest.raises(EOFError):
        greet_as_keeper(theirs, SECRET)
    theirs.close()


def test_the_process_keeps_until_its_launcher_ends_and_loads_no_framework() -> None:
    keeper = KeeperProcess(SECRET)
    try:
        modules = Path(f"/proc/{keeper.pid}/maps").read_text()
        assert "numpy" not in modules
        assert "torch" not in modules
        client = KeeperClient(keeper.name, SECRET)
        client.put("kept", b"1")
        client.close()
        again = KeeperClient(keeper.name, SECRET)
        assert contents(again, "kept") == (b"1", None)
        assert not keeper.ensure()
        os.kill(keeper.pid, signal.SIGKILL)
        os.waitid(os.P_PID, keeper.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(KeeperGone) as caught:
            again.names("")
        assert caught.value.value == keeper.name
        assert keeper.ensure()  # under the same name, empty
        with pytest.raises(KeeperGone):
            again.names("")
        anew = KeeperClient(keeper.name, SECRET)
        assert anew.names("") == {}
        anew.close()
    finally:
        keeper.close()


LAUNCHER = """
import os, signal, sys
from polyaccel.job.memory_server.start import KeeperProcess
keeper = KeeperProcess(b"a secret of the job's ranks")
print(keeper.pid, keeper.name, flush=True)
signal.pause()
"""


def test_the_process_ends_with_a_launcher_that_is_killed() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pid, name = launcher.stdout.readline().split()
    ended = os.pidfd_open(int(pid))
    KeeperClient(name, SECRET).close()
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert select.select([ended], [], [], 60)[0]
    os.close(ended)
    with pytest.raises(KeeperGone):
        KeeperClient(name, SECRET)
