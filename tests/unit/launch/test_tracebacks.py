"""What is shown of tracebacks in the output of a rank."""

from __future__ import annotations

import pytest

from polyaccel.launch.tracebacks import TracebackFold, exception_lines

CHAINED = b"""Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 1

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "b.py", line 2, in <module>
ValueError: bad sample
  hint: look at it
"""
BY_TORCH = b"".join(b"[rank1]: " + line for line in CHAINED.splitlines(keepends=True))
OUTPUT = b"begin\n%send\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("traceback", [CHAINED, BY_TORCH], ids=["python", "torch"])
@pytest.mark.parametrize(
    ("is_in_full", "expected"),
    [(True, None), (None, None), (False, b"ValueError: bad sample\n")],
    ids=["first", "undecided", "other"],
)
def test_output_keeps_its_order_in_pieces_of_any_size(
    size: int, traceback: bytes, is_in_full: bool | None, expected: bytes | None
) -> None:
    shown: list[bytes] = []
    fold = TracebackFold(shown.append)
    if is_in_full is not None:
        fold.settle(is_in_full=is_in_full)
    text = OUTPUT % traceback
    for begin in range(0, len(text), size):
        fold.feed(text[begin : begin + size])
    assert not fold.is_holding
    assert b"".join(shown) == OUTPUT % (traceback if expected is None else expected)
    assert fold.folded == (expected is not None)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"50 %\r60 %", b"50 %\r60 %"),  # a progress bar waits for nothing
        (b"Trace", b""),
        (b"ValueError: bad\n" + CHAINED, b"ValueError: bad\n"),
        (CHAINED, b""),
    ],
)
def test_what_may_be_a_traceback_is_held_until_it_is_decided(data: bytes, expected: bytes) -> None:
    shown: list[bytes] = []
    fold = TracebackFold(shown.append)
    fold.feed(data)
    assert b"".join(shown) == expected
    fold.settle(is_in_full=False)
    fold.flush()
    line = b"ValueError: bad sample\n"
    assert b"".join(shown) == data.replace(CHAINED, line)


@pytest.mark.parametrize("cut", [1, 2, 7, 8])
def test_a_traceback_without_its_exception_is_shown_as_far_as_it_came(cut: int) -> None:
    begun = b"".join(CHAINED.splitlines(keepends=True)[:cut])
    shown: list[bytes] = []
    fold = TracebackFold(shown.append)
    fold.settle(is_in_full=False)
    fold.feed(begun)
    fold.flush()
    assert b"".join(shown) == begun


def test_a_message_that_is_in_the_log_is_shown_once() -> None:
    shown: list[bytes] = []
    fold = TracebackFold(shown.append)
    fold.settle(is_in_full=False)
    fold.feed(b"rank 1: bad sample; see x.json\n" + CHAINED)
    fold.flush()
    assert b"".join(shown) == b"rank 1: bad sample; see x.json\n"


def test_the_quote_of_a_rank_begins_at_its_exception() -> None:
    assert exception_lines(BY_TORCH.decode()) == ["[rank1]: ValueError: bad sample", "[rank1]:   hint: look at it"]
    assert exception_lines("killed\nby hand") == ["killed", "by hand"]
