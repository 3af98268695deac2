"""Connections of a trainer to receivers of its weights: messages to each, and answers of all."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from polyaccel.errors import CommError, CommTimeout, PolyaccelError
from polyaccel.job.memory_server.protocol import ProtocolError, receive, send

_MOMENT_S = 0.5
"""A receiver that ends reports before that."""


class Peers:
    """Receivers by address. No call waits longer than `timeout_s` for one of them."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._peers: dict[str, socket.socket] = {}

    def connect(self, address: str, open_connection: Callable[[float], socket.socket]) -> socket.socket:
        """Connect to the receiver at `address`. Raises CommError if there is none."""
        try:
            self._peers[address] = open_connection(self._timeout_s)
        except OSError as error:
            raise CommError(
                f"no receiver of weights at {address}: {error}",
                hint="start a WeightReceiver there first; one of unix:PATH is on the host of rank 0",
                value=address,
            ) from error
        return self._peers[address]

    def send(self, address: str, head: dict[str, Any], note: bytes = b"", memory: int | None = None) -> None:
        """Send a message to one receiver."""
        try:
            send(self._peers[address], head, note, memory)
        except TimeoutError:
            raise late(self._timeout_s, address, "read a message") from None
        except OSError as error:
            # A receiver that refuses says why before it leaves.
            with suppress(OSError, EOFError, ProtocolError):
                self._require_accepted(address, receive(self._peers[address]))
            raise lost(address, str(error)) from error

    def expect(self, kind: str) -> list[dict[str, Any]]:
        """Wait for a message of this kind from each receiver, and return them."""
        heads = []
        for address, peer in self._peers.items():
            try:
                found = receive(peer)
            except TimeoutError:
                raise late(self._timeout_s, address, f"answer {kind!r}") from None
            except (OSError, EOFError, ProtocolError) as error:
                raise lost(address, str(error)) from error
            if found is None:
                raise lost(address, "it closed the connection")
            self._require_accepted(address, found)
            if found[0].get("type") != kind:
                raise lost(address, f"it answered {found[0].get('type')!r} in place of {kind!r}")
            heads.append(found[0])
        return heads

    def _require_accepted(self, address: str, found: tuple[dict[str, Any], bytes, int | None] | None) -> None:
        if found is not None and found[2] is not None:
            os.close(found[2])
        if found is not None and found[0].get("type") == "refused":
            problem = str(found[0].get("problem"))[:1000]
            raise PolyaccelError(
                f"the receiver at {address} refused the weights: {problem}",
                hint="give the receiver the model that is trained",
                value=address,
            )

    def refusals(self) -> None:
        """Raise what a receiver has reported or that it has gone, without a wait. Nothing if all are silent."""
        for address, peer in self._peers.items():
            peer.settimeout(_MOMENT_S)
            try:
                found = receive(peer)
            except TimeoutError:
                continue
            except (OSError, EOFError, ProtocolError) as error:
                raise lost(address, str(error)) from error
            finally:
                peer.settimeout(self._timeout_s)
            if found is None:
                raise lost(address, "it closed the connection")
            self._require_accepted(address, found)

    def abort(self, problem: str) -> None:
        """Report to the receivers that the rest will not come."""
        for peer in self._peers.values():
            with suppress(OSError):
                peer.setblocking(False)  # a stopped receiver does not keep the trainer once more
                send(peer, {"type": "abort", "problem": problem})

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers.values():
            peer.close()


def lost(address: str, why: str) -> CommError:
    """Return the error for a receiver that has gone."""
    return CommError(
        f"lost the receiver of weights at {address}: {why}",
        hint="start it again; training can continue, and the next transfer starts from the beginning",
        value=address,
    )


def late(timeout_s: float, address: str, what: str) -> CommTimeout:
    """Return the error for a receiver that is too slow."""
    return CommTimeout(
        f"timed out after {timeout_s:g} s waiting for the receiver at {address} to {what}",
        hint="look at the receiver; training can continue, and the next transfer starts from the beginning",
        value=address,
    )
