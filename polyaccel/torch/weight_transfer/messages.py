"""Messages of a trainer, as a receiver reads them, and errors about its trainer."""

from __future__ import annotations

import os
import socket
from typing import Any

from polyaccel.errors import CommError, CommTimeout
from polyaccel.job.memory_server.protocol import ProtocolError, receive


def message_with_memory(connection: socket.socket, timeout_s: float) -> tuple[dict[str, Any], bytes, int | None]:
    """Return the next message and its open file, which is the caller's. Raises CommTimeout, CommError."""
    try:
        found = receive(connection)
    except TimeoutError:
        raise CommTimeout(
            f"timed out after {timeout_s:g} s waiting for the next bucket of a weight transfer",
            hint="raise timeout_s of WeightReceiver if gathering takes longer",
            value=timeout_s,
        ) from None
    except (OSError, EOFError, ProtocolError) as error:
        raise gone(str(error)) from error
    if found is None:
        raise gone("it closed the connection")
    return found


def message(connection: socket.socket, timeout_s: float) -> tuple[dict[str, Any], bytes]:
    """Return the next message. Raises CommTimeout, CommError."""
    head, note, memory = message_with_memory(connection, timeout_s)
    if memory is not None:
        os.close(memory)
    return head, note


def wrong_digest(name: str) -> CommError:
    """Return the error for values that are not those that were sent."""
    return CommError(f"weights of {name!r} have another digest than was sent", hint="send them again", value=name)


def gone(why: str) -> CommError:
    """Return the error for a trainer that has gone."""
    return CommError(f"lost the trainer in a weight transfer: {why}", hint="wait for its next transfer", value=why)
