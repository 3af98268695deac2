"""Lines for agents that hear nothing on their standard input: each connects to the launcher instead.

[Note: An agent that calls back]
pdsh gives the programs that it starts no input, and everybody may read their arguments. But what an agent prints comes
back through ssh, where nobody else reads it. So the agent draws a key, prints it with its first word, and connects to
the launcher's port, at the address that its ssh came from. The launcher sends a random number, and the agent's seal of
it says whose connection this is. What the launcher sends is encrypted and sealed by that key, which only these two
have, with a stream and a number of its own for each record: it may hold tokens of the user's. All that comes back over
the connection is the agent's last word, sealed too, for its output may wait for a slow reader.
Whoever connects without the key is let go; whoever cuts the way can end the job, and no more.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import selectors
import socket
import struct
from contextlib import suppress
from math import inf
from time import monotonic

from polyaccel.job_auth import MAC_NBYTES, sign, verify

KEY_NBYTES = 32
LOST = 255
"""The exit code of a job that has lost the way to an agent, as that of ssh."""
_NONCE_NBYTES = 32
_GREETING_S = 10.0
_ENDED_S = 1.0
"""An agent's last word on its output may be later than the end of its connection by so much."""
_NUMBER = struct.Struct("<I")
_CODE = struct.Struct("<i")
_END_NBYTES = MAC_NBYTES + _CODE.size
_PROOF_NBYTES = _NUMBER.size + MAC_NBYTES
_MOST_NBYTES = 1 << 28
_MOST_STRANGERS = 256
_CHUNK_NBYTES = 1 << 16


class EncryptedStream:
    """One direction of a connection: `sign` by one side in order, `opened` by the other in the same."""

    def __init__(self, key: bytes, nonce: bytes) -> None:
        self._key = key
        self._nonce = nonce
        self._count = 0
        self._held = b""

    def sealed(self, data: bytes) -> bytes:
        """The next record."""
        record = sign(self._key, self._place(), self._crypt(data))
        self._count += 1
        return _NUMBER.pack(len(record)) + record

    def opened(self, data: bytes) -> bytes:
        """What the records say that are whole with these bytes. Raises ValueError for one that is not the next."""
        self._held += data
        said = b""
        while len(self._held) >= _NUMBER.size:
            (nbytes,) = _NUMBER.unpack_from(self._held)
            if nbytes > _MOST_NBYTES:
                raise ValueError(f"a record of {nbytes} bytes")
            if len(self._held) < _NUMBER.size + nbytes:
                break
            found = verify(self._key, self._place(), self._held[_NUMBER.size : _NUMBER.size + nbytes])
            if found is None:
                raise ValueError("a record that the launcher did not seal")
            said += self._crypt(found)
            self._count += 1
            self._held = self._held[_NUMBER.size + nbytes :]
        return said

    def last_word(self, code: int) -> bytes:
        """What the agent sends when its part of the job has ended with this code."""
        return b"e" + sign(self._key, f"polyaccel end {self._nonce.hex()}", _CODE.pack(code))

    def code_in(self, said: bytes) -> int | None:
        """The code of an agent that has said all this; None where the last word is not its last word."""
        _, mark, word = said.partition(b"e")
        found = verify(self._key, f"polyaccel end {self._nonce.hex()}", word) if mark else None
        return None if found is None or len(found) != _CODE.size else int(_CODE.unpack(found)[0])

    def _place(self) -> str:
        return f"polyaccel launcher {self._nonce.hex()} {self._count}"

    def _crypt(self, data: bytes) -> bytes:
        numbers = self._nonce + self._count.to_bytes(8, "little")
        stream = hashlib.shake_256(b"polyaccel stream" + self._key + numbers).digest(len(data))
        return (int.from_bytes(data, "little") ^ int.from_bytes(stream, "little")).to_bytes(len(data), "little")


def call_back(address: str, port: int, number: int, key: bytes) -> tuple[socket.socket, EncryptedStream]:
    """The agent's side: a connection to the launcher, and what opens its records. Raises OSError."""
    connection = socket.create_connection((address, port), timeout=_GREETING_S)
    try:
        nonce = b""
        while len(nonce) < _NONCE_NBYTES:
            part = connection.recv(_NONCE_NBYTES - len(nonce))
            if not part:
                raise ConnectionError("the launcher has hung up")
            nonce += part
        connection.sendall(_proof(key, number, nonce))
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    return connection, EncryptedStream(key, nonce)


class _Connection:
    """One that was accepted: a stranger's until it has proved whose it is."""

    def __init__(self, raw: socket.socket) -> None:
        self.raw = raw
        self.nonce = secrets.token_bytes(_NONCE_NBYTES)
        self.proof = b""
        self.until_s = monotonic() + _GREETING_S
        self.records: EncryptedStream | None = None
        self.unsent = b""
        self.said = b""

    def flush(self) -> None:
        with suppress(BlockingIOError):
            while self.unsent:
                self.unsent = self.unsent[self.raw.send(self.unsent) :]


class CallbackServer:
    """The launcher's side: agents by their hosts' numbers. `take` whenever `fileno` can be read, and now and then."""

    def __init__(self) -> None:
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=is_dual)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: list[_Connection] = []
        self._known: dict[int, _Connection] = {}
        self._keys: dict[int, bytes] = {}
        self._waiting: dict[int, list[bytes]] = {}
        self._gone_s: dict[int, float] = {}
        self.codes: dict[int, int] = {}
        """What the agents say that their parts of the job ended with."""

    def fileno(self) -> int:
        return self._selector.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room, or for the proof of a caller whose key came later."""
        return any(each.unsent for each in self._known.values()) or any(
            len(each.proof) == _PROOF_NBYTES for each in self._strangers
        )

    def expect(self, number: int, key: bytes) -> None:
        """The agent of that number has this key."""
        self._keys.setdefault(number, key)

    def send(self, number: int, line: bytes) -> None:
        """Send a line, now or when that agent is there. One that has gone hears nothing."""
        connection = self._known.get(number)
        if connection is None:
            self._waiting.setdefault(number, []).append(line)
        elif connection.records is not None and number not in self._gone_s:
            connection.unsent += connection.records.sealed(line)
            self._flush(number)

    def flush(self) -> None:
        """Send what there is room for."""
        for number in [number for number, each in self._known.items() if each.unsent]:
            self._flush(number)

    def take(self) -> None:
        """Accept who connects, and read who is there."""
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept()
            elif isinstance(key.data, int):
                self._read(key.data)
            else:
                self._read_stranger(key.data)
        for stranger in list(self._strangers):
            self._admit(stranger)

    def lost(self) -> list[int]:
        """The agents that have hung up without a last word, or have lost the way by which they print."""
        now = monotonic()
        return sorted(number for number, gone_s in self._gone_s.items() if now - gone_s >= _ENDED_S)

    def lost_at_s(self) -> float:
        """When `lost` may have somebody, unless something comes before."""
        return min((gone_s + _ENDED_S for gone_s in self._gone_s.values()), default=inf)

    def forget(self, number: int) -> None:
        """That agent has said its last word."""
        self._gone_s[number] = inf

    def close(self) -> None:
        for each in (*self._strangers, *self._known.values()):
            each.raw.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        with suppress(OSError):
            raw, _ = self._listener.accept()
            if len(self._strangers) >= _MOST_STRANGERS:
                self._let_go(self._strangers[0])
            raw.setblocking(False)
            stranger = _Connection(raw)
            stranger.raw.send(stranger.nonce)  # an empty connection has room for it
            self._strangers.append(stranger)
            self._selector.register(raw, selectors.EVENT_READ, stranger)

    def _read_stranger(self, stranger: _Connection) -> None:
        try:
            data = stranger.raw.recv(_PROOF_NBYTES - len(stranger.proof) or 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        stranger.proof += data
        if not data or len(stranger.proof) > _PROOF_NBYTES:
            self._let_go(stranger)

    def _admit(self, stranger: _Connection) -> None:
        """Let a stranger in that is an agent; wait for one whose key is not known yet."""
        if len(stranger.proof) == _PROOF_NBYTES:
            (number,) = _NUMBER.unpack_from(stranger.proof)
            key = self._keys.get(number)
            if key is not None:
                if number in self._known or not hmac.compare_digest(
                    stranger.proof, _proof(key, number, stranger.nonce)
                ):
                    self._let_go(stranger)
                    return
                self._strangers.remove(stranger)
                self._known[number] = stranger
                stranger.records = EncryptedStream(key, stranger.nonce)
                self._selector.modify(stranger.raw, selectors.EVENT_READ, number)
                for line in self._waiting.pop(number, []):
                    self.send(number, line)
                return
        if monotonic() >= stranger.until_s:
            self._let_go(stranger)

    def _let_go(self, stranger: _Connection) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.raw)
        stranger.raw.close()

    def _read(self, number: int) -> None:
        try:
            data = self._known[number].raw.recv(_CHUNK_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            connection = self._known[number]
            connection.said = (connection.said + data)[: 1 + _END_NBYTES]
            if connection.records is not None and (code := connection.records.code_in(connection.said)) is not None:
                if code == LOST:  # why, the end of the way says: it comes within `_ENDED_S`
                    self._hang_up(number)
                else:
                    self.codes[number] = code
                    self.forget(number)
        else:
            self._hang_up(number)

    def _flush(self, number: int) -> None:
        try:
            self._known[number].flush()
        except OSError:
            self._hang_up(number)

    def _hang_up(self, number: int) -> None:
        connection = self._known[number]
        connection.unsent = b""
        with suppress(KeyError, ValueError):  # done before
            self._selector.unregister(connection.raw)
        connection.raw.close()
        self._gone_s.setdefault(number, monotonic())


def _proof(key: bytes, number: int, nonce: bytes) -> bytes:
    return _NUMBER.pack(number) + sign(key, f"polyaccel agent {number}", nonce)[:MAC_NBYTES]
