"""What a collective says of itself: how much each rank sends, and how a call is described."""

from __future__ import annotations

import pytest

from polyaccel.comm.arguments import MOST_SHOWN, shown_counts
from polyaccel.comm.collective import Collective, Operation

WORLD = 3
COUNTS = (5, 0, 2)
ARRIVING, LEAVING = (1, 4, 2), (3, 0, 6)


def call(operation: Operation, numel: int, **named: object) -> Collective:
    return Collective(operation, numel=numel, **named)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("collective", "sent"),
    [
        (call(Operation.ALL_REDUCE, 12), [16, 16, 16]),
        (call(Operation.REDUCE_SCATTER, 12), [8, 8, 8]),
        (call(Operation.ALL_GATHER, 12), [8, 8, 8]),
        (call(Operation.ALL_TO_ALL, 12), [8, 8, 8]),
        (call(Operation.REDUCE_SCATTER, 7, counts=COUNTS), [2, 7, 5]),
        (call(Operation.ALL_GATHER, 7, counts=COUNTS), [10, 0, 4]),
        (call(Operation.ALL_TO_ALL, 7, counts=ARRIVING, source_counts=LEAVING), [6, 9, 3]),
        (call(Operation.BROADCAST, 12, root=1), [0, 12, 0]),
        (call(Operation.GATHER, 12, root=1), [4, 0, 4]),
        (call(Operation.GATHER, 7, root=2, counts=COUNTS), [5, 0, 0]),
        (call(Operation.SCATTER, 12, root=1), [0, 8, 0]),
        (call(Operation.SCATTER, 7, root=0, counts=COUNTS), [2, 0, 0]),
        (call(Operation.SEND, 12, root=1), [12, 12, 12]),
        (call(Operation.RECV, 12, root=1), [0, 0, 0]),
        (call(Operation.BARRIER, 0), [0, 0, 0]),
    ],
    ids=str,
)
def test_what_each_rank_sends(collective: Collective, sent: list[float]) -> None:
    assert [collective.sent_numel(rank, WORLD) for rank in range(WORLD)] == sent


def test_a_batch_sends_what_its_messages_send() -> None:
    batch = call(Operation.BATCH, 16, parts=(call(Operation.SEND, 3), call(Operation.RECV, 9), call(Operation.SEND, 4)))
    assert batch.sent_numel(0, WORLD) == 7


def test_parts_lie_one_behind_the_other() -> None:
    even, uneven = call(Operation.ALL_GATHER, 12), call(Operation.ALL_GATHER, 7, counts=COUNTS)
    assert even.bounds(WORLD) == [0, 4, 8, 12]
    assert uneven.bounds(WORLD) == [0, 5, 5, 7]
    assert [even.length_of(rank, WORLD) for rank in range(WORLD)] == [4, 4, 4]
    assert [uneven.length_of(rank, WORLD) for rank in range(WORLD)] == [5, 0, 2]


def test_only_a_numbered_call_shows_its_number() -> None:
    collective = call(Operation.BARRIER, 0, label="step")
    assert str(collective) == "barrier 'step'"
    collective.number = 0
    assert str(collective) == "#0 barrier 'step'"
    collective.number = -1
    assert str(collective) == "barrier 'step'"


def test_many_counts_are_shortened_and_told_apart() -> None:
    assert shown_counts(None) == "[]"
    assert shown_counts((1, 2)) == "[1, 2]"
    most = (7,) * MOST_SHOWN
    assert shown_counts(most) == str(list(most))
    longer = [shown_counts((*most, last)) for last in (1, 2)]
    assert all(text.startswith("[7, 7, ") and f"... {MOST_SHOWN + 1} counts, checksum " in text for text in longer)
    assert longer[0] != longer[1]
