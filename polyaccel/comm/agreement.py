"""Debug mode: ranks compare what they are about to call, so that a mismatch is an error and not a hang."""

from __future__ import annotations

from polyaccel.comm.arguments import Call
from polyaccel.comm.base import Communicator
from polyaccel.errors import CommError


def check_agreement(communicator: Communicator, seq: int, call: Call) -> None:
    """Compare (number, operation, size, type, root or reduction) over all ranks.

    Raises CommError, the same on every rank, which names the ranks that differ from the first one and both calls.
    """
    mine = (seq, call.op, call.numel, call.dtype.value if call.dtype else None, call.detail)
    calls = communicator.all_gather_object((mine, f"#{seq} {call}"))
    wanted, wanted_text = calls[0]
    others = [(rank, text) for rank, (theirs, text) in enumerate(calls) if theirs != wanted]
    if others:
        named = ", ".join(f"rank {communicator.ranks[rank]} called {text}" for rank, text in others)
        raise CommError(
            f"ranks disagree about a collective: rank {communicator.ranks[0]} called {wanted_text}, {named}",
            cure="every rank of a group must make the same calls in the same order, with the same sizes and types",
            value=tuple(communicator.ranks[rank] for rank, _ in others),
        )
