"""The protocol of ranks and the keeper over a socket without a file: authentication, then requests and answers.

[Note: Keeper authentication]
The socket's name is abstract, so nothing of it stays on a disk; any process of the host can connect to it, and when the
keeper has died any process can take the name. So both sides look at the user whom the system names as the other's, and
both prove that they have the job's secret: each sends a random number, and seals both numbers. Nothing that a peer
sends is read as more than these proofs before they are right, and afterwards its lengths are bounded.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from polyaccel.job.auth import MAC_NBYTES, sign

KEEPER_VARIABLE = "POLYACCEL_MEMORY_SERVER"
"""The variable with the name of the keeper's socket."""
MOST_KEY_LENGTH = 512
MOST_NOTE_NBYTES = 1 << 28
_MOST_HEAD_NBYTES = 1 << 24
_NONCE_NBYTES = 32
_LENGTHS = struct.Struct("<IQ")
_CREDENTIALS = struct.Struct("3i")
_OF_KEEPER, _OF_RANK = "polyaccel keeper", "polyaccel rank of a keeper"
UNCHANGING = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)
"""Seals of kept memory: its length stays what the keeper has counted, and no reader finds a moved end."""


class ProtocolError(Exception):
    """Authentication or protocol error."""


def address_of(name: str) -> str:
    """The abstract address of the keeper called `name`."""
    return "\0" + name


def is_own_user(connection: socket.socket) -> bool:
    """Whether the other side of a connection on this host is a process of this user."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())


def authenticate_client(connection: socket.socket, secret: bytes) -> None:
    """Prove the secret to a keeper, after it has proved it. Raises Refused."""
    if not is_own_user(connection):
        raise ProtocolError("another user's process has the keeper's name")
    prove_secret(connection, secret, server=_OF_KEEPER, client=_OF_RANK)


def greet_as_keeper(connection: socket.socket, secret: bytes) -> None:
    """The keeper's side of `authenticate_client`. Raises Refused."""
    check_secret(connection, secret, server=_OF_KEEPER, client=_OF_RANK)


def prove_secret(connection: socket.socket, secret: bytes, *, server: str, client: str) -> None:
    """Prove the secret to a server, after it has proved it. `server` and `client` name both roles. Raises Refused."""
    ours = secrets.token_bytes(_NONCE_NBYTES)
    connection.sendall(ours)
    answer = exactly(connection, _NONCE_NBYTES + MAC_NBYTES)
    theirs, proof = answer[:_NONCE_NBYTES], answer[_NONCE_NBYTES:]
    if not hmac.compare_digest(proof, _proof(secret, server, ours + theirs)):
        raise ProtocolError("the server does not have the job's secret")
    connection.sendall(_proof(secret, client, theirs + ours))


def check_secret(connection: socket.socket, secret: bytes, *, server: str, client: str) -> None:
    """The server's side of `prove_secret`. Raises Refused."""
    theirs, ours = exactly(connection, _NONCE_NBYTES), secrets.token_bytes(_NONCE_NBYTES)
    connection.sendall(ours + _proof(secret, server, theirs + ours))
    if not hmac.compare_digest(exactly(connection, MAC_NBYTES), _proof(secret, client, ours + theirs)):
        raise ProtocolError("a peer does not have the job's secret")


def send(connection: socket.socket, head: Mapping[str, Any], note: bytes = b"", memory: int | None = None) -> None:
    """Send a message: plain values, bytes, and an open file."""
    encoded = json.dumps(head).encode("ascii")
    lengths = _LENGTHS.pack(len(encoded), len(note))
    socket.send_fds(connection, [lengths], [] if memory is None else [memory])
    connection.sendall(encoded + note)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes, int | None] | None:
    """Receive a message, whose file is the caller's; None at the end. Raises Refused, EOFError."""
    lengths, files, *_ = socket.recv_fds(connection, _LENGTHS.size, 4)
    try:
        if not lengths:
            return None
        lengths += exactly(connection, _LENGTHS.size - len(lengths))
        head_nbytes, note_nbytes = _LENGTHS.unpack(lengths)
        if head_nbytes > _MOST_HEAD_NBYTES or note_nbytes > MOST_NOTE_NBYTES or len(files) > 1:
            raise ProtocolError(f"a message of {head_nbytes} and {note_nbytes} bytes with {len(files)} files")
        try:
            head = json.loads(exactly(connection, head_nbytes))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message that is not JSON: {error}") from error
        if not isinstance(head, dict):
            raise ProtocolError(f"a message that is a {type(head).__name__}")
        note = exactly(connection, note_nbytes)
        return head, note, files.pop() if files else None
    finally:
        for file in files:
            os.close(file)


def seal_length(memory: int) -> None:
    """Let memory without a name keep its length for good."""
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, UNCHANGING)


def has_sealed_length(memory: int) -> bool:
    """Whether an open file is memory without a name whose length cannot change."""
    with suppress(OSError):
        return fcntl.fcntl(memory, fcntl.F_GET_SEALS) & UNCHANGING == UNCHANGING
    return False


def exactly(connection: socket.socket, nbytes: int) -> bytes:
    """The next bytes that come. Raises EOFError when the other side ends before."""
    data = bytearray()
    while len(data) < nbytes:
        part = connection.recv(min(nbytes - len(data), 1 << 20))
        if not part:
            raise EOFError("the other side ended in the middle of a message")
        data += part
    return bytes(data)


def _proof(secret: bytes, context: str, numbers: bytes) -> bytes:
    return sign(secret, context, numbers)[:MAC_NBYTES]
