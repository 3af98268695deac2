"""A rank's connection to the keeper of its host."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from polyaccel.errors import CheckpointError
from polyaccel.job.auth import job_secret_from_env
from polyaccel.job.memory_server.protocol import (
    KEEPER_VARIABLE,
    ProtocolError,
    address_of,
    authenticate_client,
    receive,
    send,
)

_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry's note, and its memory as an open file that is the holder's to close; None where it has none."""

    note: bytes
    memory: int | None


class KeeperGone(CheckpointError):
    """The keeper has ended, or never was: what it held is lost, and nothing can be kept."""


class KeeperClient:
    """Requests to the keeper called `name`, by one thread at a time.

    Every method raises KeeperGone where the keeper is gone, and CheckpointError where it refuses.
    """

    def __init__(self, name: str, secret: bytes) -> None:
        self.name = name
        self._lock = Lock()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(_LIMIT_S)
        try:
            self._connection.connect(address_of(name))
            authenticate_client(self._connection, secret)
        except (OSError, EOFError, ProtocolError) as error:
            self._connection.close()
            raise KeeperGone(f"the keeper of this host cannot be reached: {error}", value=name) from error

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> KeeperClient | None:
        """Connect to the keeper that the launcher has named. Return None without one, or without a secret."""
        name, secret = environ.get(KEEPER_VARIABLE, ""), job_secret_from_env(environ)
        return cls(name, secret) if name and secret else None

    def put(self, key: str, note: bytes = b"", memory: int | None = None) -> None:
        """Let it keep a note and memory without a name, whose length is sealed, in the place of what `key` had."""
        self._ask({"do": "put", "key": key}, note, memory)

    def get(self, key: str) -> Entry | None:
        """What it keeps under a key."""
        head, note, memory = self._ask({"do": "get", "key": key})
        return Entry(note, memory) if head.get("found") else None

    def names(self, key: str) -> dict[str, int]:
        """Return `key` if kept, or keys below one with a final slash, sorted, with their lengths in bytes."""
        return dict(self._ask({"do": "names", "key": key})[0]["names"])

    def drop(self, key: str) -> int:
        """Let it forget the keys that `names` gives. Returns how many there were."""
        return int(self._ask({"do": "drop", "key": key})[0]["dropped"])

    def hold(self) -> None:
        """Keep it for this connection's life, in place of the former holder; repeat within its silence time."""
        self._ask({"do": "hold", "key": ""})

    def close(self) -> None:
        """End the connection; what is kept stays, unless this is who holds the keeper."""
        self._connection.close()

    def _ask(
        self, head: dict[str, Any], note: bytes = b"", memory: int | None = None
    ) -> tuple[dict[str, Any], bytes, int | None]:
        try:
            with self._lock:
                send(self._connection, head, note, memory)
                answer = receive(self._connection)
        except (OSError, EOFError, ProtocolError) as error:
            self._connection.close()  # half a message may be under way
            raise KeeperGone(f"the keeper of this host does not answer: {error}", value=self.name) from error
        if answer is None:
            raise KeeperGone("the keeper of this host has ended", value=self.name)
        if "refused" in answer[0]:
            if answer[2] is not None:
                os.close(answer[2])
            raise CheckpointError(f"the keeper of this host refuses: {answer[0]['refused']}", value=head["key"])
        return answer
