"""Ranks compare what they are about to call, so that a mismatch is an error and not a hang."""

from __future__ import annotations

from collections.abc import Sequence

from polyaccel.comm.arguments import Call, check_members
from polyaccel.comm.base import Communicator
from polyaccel.errors import CommError


def check_agreement(communicator: Communicator, seq: int, call: Call) -> None:
    """Debug mode: compare (number, operation, size, type, root or reduction) over all ranks.

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


def agreed_members(communicator: Communicator, ranks: Sequence[int]) -> tuple[int, ...]:
    """`ranks` of a split, on which all ranks agree. Collective. Raises CommError on every rank where they do not."""
    members = tuple(ranks)
    check_members("split", members, communicator.world_size)
    named = communicator.all_gather_object(members)
    if set(named) != {members}:
        raise CommError(
            f"split: ranks name different groups: {[list(one) for one in named]}",
            cure="every rank of the group must call split with the same ranks",
            value=members,
        )
    return members
