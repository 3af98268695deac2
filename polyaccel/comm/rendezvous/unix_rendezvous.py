"""Notes between the ranks of one host that share nothing yet, where there is no torch whose store would carry them.

[Note: Abstract Unix socket]
Rank 0 listens on a Unix socket in Linux's abstract namespace, which ends with the process: there is no file to protect
and none to remove. Its name follows from the user and from the launcher's rendezvous address, so anyone could guess it;
therefore both sides ask the kernel whose process is at the other end, and talk to their own user's only.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from hashlib import sha256
from selectors import EVENT_READ, DefaultSelector
from time import sleep
from typing import Any

from polyaccel.core import tagged_json
from polyaccel.core.deadline import Deadline
from polyaccel.errors import CommError, CommTimeout

_MOST_NBYTES = 1 << 20
_RETRY_S = 0.01
_GRACE_S = 10.0  # the others wait longer than rank 0, which then sends them the missing ranks
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group


def all_gather_on_host(where: str, rank: int, world_size: int, text: str, deadline: Deadline) -> list[str]:
    """Return every rank's `text` in rank order; `where` is unique to the job. Raises CommTimeout, CommError."""
    door = f"\0polyaccel-{os.geteuid()}-{sha256(where.encode()).hexdigest()[:32]}"
    if rank == 0:
        return _collect(door, where, world_size, text, deadline)
    return _bring(door, where, {"rank": rank, "world_size": world_size, "text": text}, deadline)


def _collect(door: str, where: str, world_size: int, text: str, deadline: Deadline) -> list[str]:
    notes = {0: text}
    callers: list[socket.socket] = []
    try:
        with _new_socket() as listener, DefaultSelector() as ready:
            try:
                listener.bind(door)
            except OSError as error:
                raise CommError(
                    f"rank 0 cannot be reached at {where}: {error.strerror}",
                    hint="another job of yours uses it: give each its own MASTER_PORT",
                    value=where,
                ) from error
            listener.listen(world_size)
            ready.register(listener, EVENT_READ)
            while len(notes) < world_size:
                found = ready.select(deadline.remaining_s())
                if not found and deadline.is_over:
                    missing = [rank for rank in range(world_size) if rank not in notes]
                    _answer(callers, {"missing": missing})
                    raise _timeout(missing, where, deadline.timeout_s)
                for key, _ in found:
                    if key.fileobj is listener:
                        caller, _ = listener.accept()
                        callers.append(caller)
                        if _user_of(caller) == os.geteuid():
                            ready.register(caller, EVENT_READ, caller)
                        continue
                    ready.unregister(key.data)
                    problem = _take(notes, _received(key.data), world_size)
                    if problem:
                        _answer([key.data], {"problem": problem})
        everything = [notes[rank] for rank in range(world_size)]
        _answer(callers, {"notes": everything})
        return everything
    finally:
        for caller in callers:
            caller.close()


def _take(notes: dict[int, str], message: bytes, world_size: int) -> str:
    """Put a caller's note among `notes`; returns what is wrong with it."""
    if not message:
        return "nothing was sent"  # the process has ended: its rank will be missing
    match _understood(message):
        case {"rank": int(rank), "world_size": int(theirs), "text": str(text)} if rank in range(theirs):
            pass
        case _:
            return "something was sent that is not a note of a rank"
    if theirs != world_size:
        return f"rank {rank} is one of {theirs} ranks, and rank 0 one of {world_size}"
    if rank in notes:
        return f"there are two ranks {rank}"
    notes[rank] = text
    return ""


def _bring(door: str, where: str, note: Mapping[str, Any], deadline: Deadline) -> list[str]:
    with _new_socket() as caller:
        caller.settimeout(deadline.remaining_s())
        while True:
            try:
                caller.connect(door)
                break
            except (ConnectionRefusedError, BlockingIOError, TimeoutError) as error:
                if deadline.is_over:
                    raise _timeout([0], where, deadline.timeout_s) from error
                sleep(_RETRY_S)
        if _user_of(caller) != os.geteuid():
            raise CommError(
                f"a process of user {_user_of(caller)} waits at {where}",
                hint="choose another MASTER_PORT, and run all ranks as one user",
                value=_user_of(caller),
            )
        caller.settimeout(deadline.remaining_s() + _GRACE_S)
        try:
            caller.send(tagged_json.to_bytes(dict(note), "the note"))
            answer = _received(caller)
        except TimeoutError as error:
            raise _timeout([0], where, deadline.timeout_s) from error
        except BrokenPipeError:
            answer = b""
    if not answer:
        raise CommError(
            f"rank 0 ended while ranks were meeting at {where}", hint="look for the first error among the ranks"
        )
    match _understood(answer):
        case {"problem": str(problem)}:
            raise CommError(
                f"two jobs use the rendezvous {where}: {problem}", hint="give each job its own MASTER_PORT", value=where
            )
        case {"missing": [*missing]}:
            raise _timeout(missing, where, deadline.timeout_s)
        case {"notes": [*notes]} if len(notes) == note["world_size"]:
            return notes
    raise CommError(f"what waits at {where} is not a rank 0 of ours", hint="choose another MASTER_PORT", value=where)


def _understood(message: bytes) -> Any:
    """The plain value in the message; None if there is none."""
    try:
        return tagged_json.from_bytes(message)
    except tagged_json.SerializationError:
        return None


def _answer(callers: list[socket.socket], answer: Mapping[str, object]) -> None:
    """Send it to all of them. A rank that has ended meanwhile is missed by whatever the ranks do next."""
    for caller in callers:
        try:
            caller.send(tagged_json.to_bytes(dict(answer), "the answer"))
        except OSError:
            continue


def _received(peer: socket.socket) -> bytes:
    """The peer's message; empty if it has ended."""
    try:
        return peer.recv(_MOST_NBYTES)
    except ConnectionResetError:
        return b""


def _new_socket() -> socket.socket:
    # Keeps messages whole: one send is one recv.
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _user_of(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return int(user)


def _timeout(missing: list[int], where: str, timeout_s: float) -> CommTimeout:
    return CommTimeout(
        f"ranks {missing} did not come to {where} within {timeout_s:g} s",
        missing_ranks=missing,
        hint="check that all ranks were started here, with the same address and port, and that none has failed",
    )
