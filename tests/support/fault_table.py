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


@dataclass
class Row:
    """A kind of fault: how many cases were tried, how many ended as expected, and the seconds that they took."""

    expected: str
    tried: int = 0
    held: int = 0
    seconds: float = 0.0


class FaultTable:
    """The rows of a session, by fault, in the order in which they were first tried."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    @contextmanager
    def case(self, fault: str, expected: str) -> Iterator[None]:
        """Inside, one case of `fault` is tried; it has ended as `expected` says when nothing is raised."""
        row = self.rows.setdefault(fault, Row(expected))
        row.tried += 1
        started = perf_counter()
        try:
            yield
            row.held += 1
        finally:
            row.seconds += perf_counter() - started

    def lines(self) -> list[str]:
        """The table in Markdown."""
        cells = [("fault", "expected", "found", "s"), ("---", "---", "---", "---:")]
        cells += [
            (fault, row.expected, f"{row.held} of {row.tried}", f"{row.seconds:.1f}")
            for fault, row in self.rows.items()
        ]
        return [f"| {' | '.join(row)} |" for row in cells]


TABLE = FaultTable()
"""The one of this session."""
