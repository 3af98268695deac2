"""Squared norms of the parameters of all pipeline stages, exchanged on the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer


@dataclass(frozen=True, slots=True)
class StageRow:
    """The squared norms of a stage's parameters, and whether some of its gradients came late."""

    squares: Sequence[float]
    has_late: bool = False


class StageRows:
    """A vector with a row for each stage, equally long: its squared norms, then how late each of its buckets is.

    Collective among the stages, which `communicator` joins: they exchange the `names` of their parameters.
    """

    def __init__(self, communicator: Communicator, names: Sequence[str], buckets: int) -> None:
        self._communicator = communicator
        gathered = communicator.all_gather_object([list(names), buckets])
        self.names: list[list[str]] = [theirs for theirs, _ in gathered]
        self._buckets: list[int] = [number for _, number in gathered]
        self._length: int = max(len(theirs) + number for theirs, number in gathered)

    @property
    def numel(self) -> int:
        """Elements of all rows."""
        return self._length * len(self.names)

    def gather(self, rows: Buffer, squares: Buffer, late: Buffer | None) -> None:
        """Fill `rows`, which are zero, with what every stage gives. Collective."""
        row = rows.view(self._length * self._communicator.rank, self._length)
        row.view(0, squares.numel).copy_from(squares)
        if late is not None:
            row.view(squares.numel, late.numel).copy_from(late)
        self._communicator.all_gather(rows, row, label="norms of stages")

    def cut(self, values: array[float]) -> list[StageRow]:
        """Read rows that are on the host."""
        found = []
        for index, (names, buckets) in enumerate(zip(self.names, self._buckets, strict=True)):
            row = values[self._length * index : self._length * (index + 1)]
            found.append(StageRow(row[: len(names)], any(row[len(names) : len(names) + buckets])))
        return found
