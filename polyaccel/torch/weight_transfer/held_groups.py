"""Groups of weight transfers that wait for the next one, at the sender and at the receiver.

[Note: Held groups]
Meeting over gloo takes longer than sending a small model, so a group outlives a transfer that ended well. It has an
identity, drawn by its sender. After the proof of the secret a receiver reports the identities that it holds. A sender's
group is used again when all receivers hold it, and a new one is made otherwise. A transfer that fails, or that its
receiver did not read to the end, leaves the group at both sides: messages may be under way in it. A receiver leaves
groups that a transfer does not name: their sender, or another receiver in them, was started again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from polyaccel.comm.base import Communicator
from polyaccel.errors import CommError


@dataclass(frozen=True)
class HeldGroup:
    """A group with an identity, and the limit on its messages."""

    identity: str
    group: Communicator
    timeout_s: float

    def leave(self) -> None:
        """Close it."""
        with suppress(CommError):
            self.group.close()


class SenderGroups:
    """The groups of a rank that sends, by the addresses of their receivers."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, ...], HeldGroup] = {}

    def identity(self, addresses: Sequence[str], timeout_s: float) -> str:
        """Return that of the group which can be used again; "" without one."""
        held = self._held.get(tuple(addresses))
        return held.identity if held is not None and held.timeout_s == timeout_s else ""

    def take(self, addresses: Sequence[str]) -> HeldGroup | None:
        """Return the group, which is the caller's."""
        return self._held.pop(tuple(addresses), None)

    def hold(self, addresses: Sequence[str], group: HeldGroup) -> None:
        """Keep a group without messages for the next transfer."""
        self._held[tuple(addresses)] = group

    def close(self) -> None:
        """Leave all."""
        while self._held:
            self._held.popitem()[1].leave()


class ReceiverGroups:
    """The groups of a receiver, by identity."""

    def __init__(self) -> None:
        self._held: dict[str, HeldGroup] = {}

    @property
    def identities(self) -> list[str]:
        """Those of the groups that can be used again."""
        return list(self._held)

    def keep_only(self, identities: Iterable[str]) -> None:
        """Leave all groups but these."""
        kept = set(identities)
        for identity in [one for one in self._held if one not in kept]:
            self._held.pop(identity).leave()

    def joined(self, identity: str, timeout_s: float, join: Callable[[], Communicator]) -> Communicator:
        """Return the group, which is joined unless it is held."""
        if identity not in self._held:
            self._held[identity] = HeldGroup(identity, join(), timeout_s)
        return self._held[identity].group

    def close(self) -> None:
        """Leave all."""
        self.keep_only(())
