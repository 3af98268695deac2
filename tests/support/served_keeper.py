"""A keeper in a thread of the test's own process."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Thread

from polyaccel.job.memory_server.client import KeeperClient
from polyaccel.job.memory_server.process import EntryStore, listen, serve

SECRET = b"a secret of the job's ranks"


class Served:
    """A keeper in a thread of this process."""

    def __init__(self, name: str, limit_nbytes: int = 1 << 30) -> None:
        self.name = name
        self.shelf = EntryStore(limit_nbytes)
        self._listener = listen(name)
        Thread(target=serve, args=(self._listener, SECRET, self.shelf), daemon=True).start()

    def connect(self, secret: bytes = SECRET) -> KeeperClient:
        return KeeperClient(self.name, secret)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.shelf.drop("")
