"""Users' own objects between ranks: anything that pickles, if the ranks share a secret, else plain values.

[Note: Sealed pickles]
A pickle is a program that its reader runs, so none is read that a stranger could have written. Ranks that have
a secret in common (`comm.secret`) seal every message for the group, the call's number and the rank that sends it,
and look at nothing before the seal is right: a stranger can neither write a message nor play an old one again. Without
a secret plain values travel unsealed, for nothing that arrives as one can run.
"""

from __future__ import annotations

import pickle
from typing import Any

from polyaccel.comm.base import Communicator
from polyaccel.comm.secret import job_secret
from polyaccel.core import tagged_json
from polyaccel.errors import CommError
from polyaccel.job import auth

_UNSEALED, _SEALED = b"u", b"s"
_PLAIN, _PICKLE = b"v", b"p"
_HINT = (
    f"start the ranks by `polyaccel run`, or set {auth.SECRET_VARIABLE} to one random text on every rank, "
    "or send plain values: None, bool, int, float, str, bytes, and lists, tuples and dicts of these"
)


def all_gather_objects(communicator: Communicator, value: Any) -> list[Any]:
    """Return every rank's `value` in rank order. Collective. See [Note: Sealed pickles]."""
    exchange = _Exchange(communicator)
    return [exchange.opened(rank, message) for rank, message in enumerate(exchange.messages(value))]


def broadcast_objects(communicator: Communicator, value: Any, root: int) -> Any:
    """Rank `root`'s `value`. Collective. Raises as `all_gather_objects` does."""
    exchange = _Exchange(communicator)
    return exchange.opened(root, exchange.messages(value if communicator.rank == root else None)[root])


class _Exchange:
    """One exchange of objects, which has a number on its group."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._secret = job_secret(communicator)
        self._place = f"{communicator.ranks} after #{communicator.last_number()}"

    def messages(self, value: Any) -> list[bytes]:
        """Every rank's message, of which this rank's carries `value`."""
        data = self._written(value)
        if self._secret is None:
            return self._communicator.all_gather_bytes(_UNSEALED + data)
        return self._communicator.all_gather_bytes(
            _SEALED + auth.sign(self._secret, self._context(self._communicator.rank), data)
        )

    def opened(self, rank: int, message: bytes) -> Any:
        """The value in group rank `rank`'s message."""
        how, data = message[:1], message[1:]
        who = f"the object of rank {self._communicator.ranks[rank]}"
        if self._secret is None:
            if how != _UNSEALED:
                raise CommError(f"{who} is sealed, and this rank has no secret", hint=_HINT, value=rank)
        else:
            inside = auth.verify(self._secret, self._context(rank), data) if how == _SEALED else None
            if inside is None:
                raise CommError(
                    f"{who} does not have the seal of this job",
                    hint=f"set {auth.SECRET_VARIABLE} to the same text on every rank; where it is, "
                    "a stranger wrote to the ranks' connection",
                    value=rank,
                )
            data = inside
        kind, data = data[:1], data[1:]
        if kind == _PICKLE and self._secret is not None:
            return pickle.loads(data)
        try:
            if kind != _PLAIN:
                raise tagged_json.SerializationError("a value that is not plain")
            return tagged_json.from_bytes(data)
        except tagged_json.SerializationError as error:
            raise CommError(f"{who} cannot be read: it holds {error.message}", hint=_HINT, value=rank) from error

    def _written(self, value: Any) -> bytes:
        try:
            return _PLAIN + tagged_json.to_bytes(value, "the object")
        except tagged_json.SerializationError as error:
            if self._secret is None:
                raise CommError(
                    f"objects that are not plain need a secret of the job: {error.message}",
                    hint=_HINT,
                    value=error.value,
                ) from error
        return _PICKLE + pickle.dumps(value)

    def _context(self, rank: int) -> str:
        return f"object of rank {rank} of {self._place}"
