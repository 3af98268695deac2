"""Agents that call their launcher back: who has the key is heard, and nobody else learns or says anything."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest

from polyaccel.job_auth import MAC_NBYTES
from polyaccel.launch.remote import callback_server as module
from polyaccel.launch.remote.callback_server import KEY_NBYTES, CallbackServer, EncryptedStream, call_back

LIMIT_S = 20.0


@pytest.fixture
def callers() -> Iterator[CallbackServer]:
    listening = CallbackServer()
    yield listening
    listening.close()


def _connected(callers: CallbackServer, number: int, key: bytes) -> tuple[socket.socket, EncryptedStream]:
    """`call_back`, while the launcher's side is served."""
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call_back, "127.0.0.1", callers.port, number, key)
        while not calling.done():
            callers.take()
    return calling.result()


def _heard(callers: CallbackServer, connection: socket.socket, records: EncryptedStream) -> bytes:
    """The next line."""
    text, until_s = b"", monotonic() + LIMIT_S
    while not text.endswith(b"\n"):
        assert monotonic() < until_s
        callers.take()
        callers.flush()
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            continue
        assert data
        text += records.opened(data)
    return text


@pytest.mark.parametrize("is_known_before", [True, False])
def test_what_waits_is_sent_once_the_agent_is_there(callers: CallbackServer, is_known_before: bool) -> None:
    key = secrets.token_bytes(KEY_NBYTES)
    callers.send(3, b"the job\n")
    if is_known_before:
        callers.expect(3, key)
    connection, records = _connected(callers, 3, key)
    callers.expect(3, key)
    assert _heard(callers, connection, records) == b"the job\n"
    callers.send(3, b"more\n" * 50_000)
    text = b""
    while len(text) < 250_000:
        text += _heard(callers, connection, records)
    assert text == b"more\n" * 50_000
    assert not callers.has_unsent
    connection.close()


def test_strangers_learn_nothing_and_take_nobodys_place(callers: CallbackServer) -> None:
    key = secrets.token_bytes(KEY_NBYTES)
    callers.expect(0, key)
    callers.send(0, b"secret\n")
    stranger, _ = _connected(callers, 0, secrets.token_bytes(KEY_NBYTES))
    talker = socket.create_connection(("127.0.0.1", callers.port))
    talker.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
    connection, own = _connected(callers, 0, key)
    assert _heard(callers, connection, own) == b"secret\n"
    second, _ = _connected(callers, 0, key)  # a second one with the key is none of ours either
    for each in (stranger, second):
        each.setblocking(True)
        each.settimeout(LIMIT_S)
        callers.take()
        assert each.recv(4096) == b""
    callers.send(0, b"on\n")
    assert _heard(callers, connection, own) == b"on\n"
    for each in (stranger, talker, connection, second):
        each.close()


def test_a_record_that_was_changed_repeated_or_left_out_is_refused() -> None:
    key, nonce = secrets.token_bytes(KEY_NBYTES), secrets.token_bytes(32)
    sender = EncryptedStream(key, nonce)
    first, second = sender.sealed(b"first line"), sender.sealed(b"second line")
    assert b"line" not in first + second
    reader = EncryptedStream(key, nonce)
    assert reader.opened(first[:7]) == b""
    assert reader.opened(first[7:] + second) == b"first linesecond line"
    for wrong in (first, second[:-1] + bytes([second[-1] ^ 1]), b"\xff\xff\xff\xff"):
        with pytest.raises(ValueError, match="record"):
            EncryptedStream(key, nonce).opened(wrong if wrong != first else second)
    with pytest.raises(ValueError, match="record"):
        reader.opened(first)
    with pytest.raises(ValueError, match="record"):
        EncryptedStream(key, secrets.token_bytes(32)).opened(first)
    assert len(first) == 4 + MAC_NBYTES + len(b"first line")


def test_who_hangs_up_without_a_last_word_is_lost(callers: CallbackServer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [monotonic()]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    connections = []
    for number in range(3):
        key = secrets.token_bytes(KEY_NBYTES)
        callers.expect(number, key)
        connections.append(_connected(callers, number, key)[0])
    until_s = monotonic() + LIMIT_S
    while len(callers._known) < len(connections) and monotonic() < until_s:
        callers.take()
    connections[0].close()
    connections[2].close()
    while len(callers._gone_s) < 2 and monotonic() < until_s:
        callers.take()
    callers.forget(2)  # its last word came another way
    assert (callers.lost(), callers.lost_at_s()) == ([], now[0] + module._ENDED_S)
    now[0] += module._ENDED_S
    assert callers.lost() == [0]
    connections[1].close()


def test_an_agents_last_word_is_its_own(callers: CallbackServer) -> None:
    key = secrets.token_bytes(KEY_NBYTES)
    callers.expect(0, key)
    connection, records = _connected(callers, 0, key)
    connection.send(records.last_word(77)[:20])
    callers.take()
    assert callers.codes == {}
    connection.send(records.last_word(77)[20:])
    connection.close()
    until_s = monotonic() + LIMIT_S
    while not callers.codes and monotonic() < until_s:
        callers.take()
    assert callers.codes == {0: 77}
    assert callers.lost() == []
    assert records.code_in(EncryptedStream(secrets.token_bytes(KEY_NBYTES), b"").last_word(0)) is None
