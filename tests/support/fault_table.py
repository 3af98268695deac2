"""Faults that are tried one after another, and the table of what came of them, which `make test-faults` prints.

`make test` tries a sample of the cases, spread over all of them; TESTS_FAULTS=full tries each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")

IS_FULL = os.environ.get("TESTS_FAULTS") == "full"


def sample(cases: Sequence[T], most: int) -> Sequence[T]:
    """All cases in the full form, else `most` of them at equal distances, the first among them."""
    if IS_FULL or len(cases) <= most:
        return cases
    return [cases[at * len(cases) // most] for at in range(most)]


@dataclass(frozen=True)
class Ends:
    """How a fault must end: what the message says, in which state everything is then, within which time, with which
    exit code where the script does not catch the error, and what is left behind."""

    message: str
    state: str
    within: str = "at once"
    code: str = "1"
    left: str = "nothing"


@dataclass
class Row:
    """A kind of fault: how many cases were tried, how many ended as expected, and the seconds that they took."""

    expected: Ends
    tried: int = 0
    held: int = 0
    seconds: float = 0.0


class FaultTable:
    """The rows of a session, by fault, in the order in which they were first tried."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    @contextmanager
    def case(self, fault: str, expected: Ends) -> Iterator[None]:
        """Inside, one case of `fault` is tried; it has ended as `expected` says when nothing is raised."""
        row = self.rows.setdefault(fault, Row(expected))
        row.tried += 1
        started = perf_counter()
        try:
            yield
            row.held += 1
        finally:
            row.seconds += perf_counter() - started

    def lines(self, day: str) -> list[str]:
        """The rows in Markdown, tried on that day."""
        cells = (
            (fault, how.within, how.code, how.message, how.state, how.left, f"{row.held} of {row.tried}", day)
            for fault, row in self.rows.items()
            for how in (row.expected,)
        )
        return [f"| {' | '.join(row)} |" for row in cells]

    def renewed(self, page: str, day: str) -> str:
        """`page` with the rows of this session in the place of those of the same faults; new ones come last."""
        mine = {_fault(line): line for line in self.lines(day)}
        lines = [mine.pop(_fault(line), line) if line.startswith("| ") else line for line in page.splitlines()]
        return "\n".join([*lines, *mine.values()]) + "\n"


def _fault(line: str) -> str:
    return line.split(" | ")[0].removeprefix("| ")


TABLE = FaultTable()
"""The one of this session."""
