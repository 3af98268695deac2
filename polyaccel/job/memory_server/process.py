"""The keeper's process, which `start` starts: entries by key, each a note of bytes and memory without a name.

It understands nothing of what it holds. Its memory is what ranks hand over, up to a bound: an entry that would go past
it is refused, and what was there stays. It ends when its launcher has: standard input is a pipe of the launcher's, and
its end is the end of all that is kept.

[Note: Keeper heartbeat]
Where a network lies between the two, a way that is cut looks like a launcher that has nothing to say. So the launcher
sends a heartbeat every few seconds, and the keeper ends without one for `far_s`. A launcher that has lost
the way to it and finds another starts a keeper of the same name: that one finds the name taken, holds the older one in
the place of the launcher that has gone, and forwards its heartbeats; so what is kept stays.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EADDRINUSE
from math import inf
from pathlib import Path
from threading import BoundedSemaphore, Condition, Lock, Thread
from time import monotonic
from typing import Any

from polyaccel.core.cgroup import memory_limit_nbytes
from polyaccel.job.memory_server.client import KeeperClient
from polyaccel.job.memory_server.protocol import (
    MOST_KEY_LENGTH,
    ProtocolError,
    address_of,
    greet_as_keeper,
    has_sealed_length,
    is_own_user,
    receive,
    send,
)

READY = b"\x1epolyaccel-keeper ready\n"
HERE = b"."
"""The answer to any line on standard input."""
_GREETING_S = 10.0
_MOST_CONNECTIONS = 4096
_SHARE_OF_MEMORY = 0.75


@dataclass(frozen=True, slots=True)
class ShelfEntry:
    """What is kept under a key. `memory` is an open file or None, `place` identifies that memory."""

    note: bytes
    memory: int | None
    place: tuple[int, int] | None
    nbytes: int


@dataclass
class EntryStore:
    """All entries, which take at most `limit_nbytes`; memory that stands under two keys counts once."""

    limit_nbytes: int
    _entries: dict[str, ShelfEntry] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def put(self, key: str, note: bytes, memory: int | None) -> None:
        """Keep an entry in place of the one of that key; `memory` is the shelf's from now on. Raises Refused."""
        try:
            entry = self._checked(key, note, memory)
            with self._lock:
                rest = {other: each for other, each in self._entries.items() if other != key}
                taken = _taken([*rest.values(), entry])
                if taken > self.limit_nbytes:
                    raise ProtocolError(f"{taken:,} bytes would be kept, and {self.limit_nbytes:,} are the most")
                former = self._entries.get(key)
                self._entries[key], memory = entry, None
            _close(former)
        finally:
            if memory is not None:
                os.close(memory)

    def get(self, key: str) -> ShelfEntry | None:
        """The entry of a key, with its own file, which the caller closes."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.memory is None:
                return entry
            return ShelfEntry(entry.note, os.dup(entry.memory), entry.place, entry.nbytes)

    def names(self, key: str) -> list[list[Any]]:
        """Return the key, keys below one with a final slash, or all, sorted, with their lengths in bytes."""
        with self._lock:
            return [[each, self._entries[each].nbytes] for each in self._below(key)]

    def drop(self, key: str) -> int:
        """Forget the entries that `names` gives. Returns how many there were."""
        with self._lock:
            gone = [self._entries.pop(each) for each in self._below(key)]
        for entry in gone:
            _close(entry)
        return len(gone)

    def _below(self, key: str) -> list[str]:
        if key and not key.endswith("/"):
            return [key] if key in self._entries else []
        return sorted(entry for entry in self._entries if entry.startswith(key))

    def _checked(self, key: str, note: bytes, memory: int | None) -> ShelfEntry:
        if not 0 < len(key) <= MOST_KEY_LENGTH:
            raise ProtocolError(f"a key of {len(key)} characters")
        if memory is None:
            return ShelfEntry(note, None, None, 0)
        if not has_sealed_length(memory):
            raise ProtocolError("only memory without a name whose length is sealed is kept")
        status = os.fstat(memory)
        return ShelfEntry(note, memory, (status.st_dev, status.st_ino), status.st_size)


def _taken(entries: Sequence[ShelfEntry]) -> int:
    memory = {entry.place: entry.nbytes for entry in entries}
    return sum(memory.values()) + sum(len(entry.note) for entry in entries)


def _close(entry: ShelfEntry | None) -> None:
    if entry is not None and entry.memory is not None:
        os.close(entry.memory)


class Lease:
    """How long a keeper stays: until its holder releases it, or has sent nothing for `silence_s`. A later holder
    replaces the one before."""

    def __init__(self, silence_s: float = inf) -> None:
        self._silence_s = silence_s
        self._until_s = monotonic() + silence_s
        self._holder = 0
        self._is_over = False
        self._changed = Condition()

    def hold(self) -> int:
        """Returns the number of who holds it now."""
        with self._changed:
            self._holder += 1
            self._until_s = monotonic() + self._silence_s
            return self._holder

    def beat(self, holder: int) -> None:
        """Note that a peer has sent something."""
        with self._changed:
            if holder == self._holder:
                self._until_s = monotonic() + self._silence_s

    def release(self, holder: int) -> None:
        """Note that a peer has gone."""
        with self._changed:
            self._is_over |= holder == self._holder
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when it is over."""
        with self._changed:
            while not self._is_over and (left_s := self._until_s - monotonic()) > 0:
                self._changed.wait(None if left_s == inf else left_s)


def serve(listener: socket.socket, secret: bytes, shelf: EntryStore, life: Lease | None = None) -> None:
    """Answer every peer that connects, for ever, in a thread for each."""
    life = life or Lease()
    room = BoundedSemaphore(_MOST_CONNECTIONS)
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed, or no descriptor is left just now
            if listener.fileno() < 0:
                return
            continue
        if is_own_user(connection) and room.acquire(blocking=False):
            Thread(target=_attend, args=(connection, secret, shelf, room, life), daemon=True).start()
        else:
            connection.close()


def _attend(connection: socket.socket, secret: bytes, shelf: EntryStore, room: BoundedSemaphore, life: Lease) -> None:
    """Answer one peer until it ends, or sends an invalid message."""
    holder = 0
    try:
        with connection, suppress(OSError, EOFError, ProtocolError):
            connection.settimeout(_GREETING_S)
            greet_as_keeper(connection, secret)
            connection.settimeout(None)
            while (message := receive(connection)) is not None:
                if message[0].get("do") == "hold":
                    holder = holder or life.hold()
                    life.beat(holder)
                    send(connection, {})
                else:
                    _answer(connection, shelf, *message)
    finally:
        if holder:
            life.release(holder)
        room.release()


def _answer(
    connection: socket.socket, shelf: EntryStore, head: dict[str, Any], note: bytes, memory: int | None
) -> None:
    key = head.get("key")
    try:
        if not isinstance(key, str):
            raise ProtocolError(f"{key!r:.100} is not a key")
        match head.get("do"):
            case "put":
                handed, memory = memory, None
                shelf.put(key, note, handed)
                send(connection, {})
            case "get":
                found = shelf.get(key)
                entry = found or ShelfEntry(b"", None, None, 0)
                try:
                    send(connection, {"found": found is not None}, entry.note, entry.memory)
                finally:
                    _close(entry)
            case "names":
                send(connection, {"names": shelf.names(key)})
            case "drop":
                send(connection, {"dropped": shelf.drop(key)})
            case other:
                raise ProtocolError(f"{other!r:.100} is not a request")
    except ProtocolError as error:
        send(connection, {"refused": str(error)})
    finally:
        if memory is not None:
            os.close(memory)


def listen(name: str) -> socket.socket:
    """The keeper's socket. Raises OSError where the name is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address_of(name))
    listener.listen(socket.SOMAXCONN)
    return listener


def main(arguments: Sequence[str]) -> None:
    """Keep ranks' entries until standard input ends, with name, limit and silence limit as arguments."""
    name, limit_nbytes, silence_s = arguments[-3], int(arguments[-2]), float(arguments[-1])
    secret = bytes.fromhex(_line(0).decode("ascii"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        listener = listen(name)
    except OSError as error:
        if error.errno != EADDRINUSE or not silence_s:
            raise
        _stand_for_launcher(KeeperClient(name, secret))
        return
    shelf, life = EntryStore(limit_nbytes or default_limit_nbytes()), Lease(silence_s or inf)
    Thread(target=serve, args=(listener, secret, shelf, life), daemon=True).start()
    Thread(target=_heed_launcher, args=(life, life.hold()), daemon=True).start()
    _say_ready()
    life.wait()


def _heed_launcher(life: Lease, holder: int) -> None:
    while os.read(0, 4096):
        life.beat(holder)
        os.write(1, HERE)
    life.release(holder)


def _stand_for_launcher(older: KeeperClient) -> None:
    """Hold a keeper that was there before; see [Note: Keeper heartbeat]."""
    older.hold()
    _say_ready()
    while os.read(0, 4096):
        older.hold()
        os.write(1, HERE)
    older.close()


def _say_ready() -> None:
    os.write(1, READY)


def _line(descriptor: int) -> bytes:
    """A line, and nothing of what comes after it."""
    data = b""
    while not data.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        data += byte
    return data.rstrip(b"\n")


def default_limit_nbytes() -> int:
    """Three quarters of the memory of this host, or of what a control group leaves of it to this process."""
    total_nbytes = int(Path("/proc/meminfo").read_text().split("\n", 1)[0].split()[1]) * 1024
    limit = memory_limit_nbytes()
    return int(_SHARE_OF_MEMORY * (total_nbytes if limit is None else min(total_nbytes, limit)))


if __name__ == "__main__":
    main(sys.argv)
