"""Figures over steps, thinned to what a page can show."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

MOST_COLUMNS = 400


class FigureTable:
    """The figures of each step, by name. Of more than `most` rows two neighbours become one, which keeps mean, least
    and greatest of each figure, so that a spike of a single step stays to be seen in a run of a million.

    A step that comes again with a figure that it has, as after a checkpoint was loaded, replaces what there was of it
    and of all later ones (where rows have been joined, the later steps in its row stay in the mean). Other figures of
    the last step join it: scripts write their figures one by one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._stride = 1
        self._rows: list[tuple[int, dict[str, list[float]]]] = []
        """The number of a row's first step divided by the stride, and of each figure count, sum, least and greatest."""
        self._names: dict[str, None] = {}
        self.last_step: int | None = None
        self._of_last_step: set[str] = set()

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the finite ones of the figures of `step`."""
        is_again = self.last_step == step and not self._of_last_step.isdisjoint(figures)
        if is_again or (self.last_step is not None and step < self.last_step):
            self._forget_from(step)
        if is_again or step != self.last_step:
            self._of_last_step.clear()
        self.last_step = step
        self._of_last_step.update(figures)
        key = step // self._stride
        if not self._rows or self._rows[-1][0] != key:
            self._rows.append((key, {}))
        row = self._rows[-1][1]
        for name, value in figures.items():
            if not isfinite(value):
                continue
            if name not in self._names:
                if len(self._names) >= MOST_COLUMNS:
                    continue
                self._names[name] = None
            _join(row, name, [1, value, value, value])
        if len(self._rows) > self._most:
            self._thin()

    def _forget_from(self, step: int) -> None:
        key = step // self._stride
        while self._rows and (self._rows[-1][0] > key or (self._stride == 1 and self._rows[-1][0] == key)):
            self._rows.pop()

    def _thin(self) -> None:
        self._stride *= 2
        rows: list[tuple[int, dict[str, list[float]]]] = []
        for key, row in self._rows:
            if not rows or rows[-1][0] != key // 2:
                rows.append((key // 2, {}))
            for name, cell in row.items():
                _join(rows[-1][1], name, cell)
        self._rows = rows

    def shown(self) -> dict[str, Any]:
        """Return `step` and `figures`' values; joined rows have means with `low` and `high`."""
        half = (self._stride - 1) / 2
        parts: dict[str, Any] = {"step": [key * self._stride + half for key, _ in self._rows], "figures": {}}
        parts["figures"] = self._columns(lambda cell: cell[1] / cell[0])
        if self._stride > 1:
            parts["low"], parts["high"] = self._columns(lambda cell: cell[2]), self._columns(lambda cell: cell[3])
        return parts

    def _columns(self, value_of: Any) -> dict[str, list[float | None]]:
        return {
            name: [rounded(value_of(row[name])) if name in row else None for _, row in self._rows]
            for name in self._names
            if any(name in row for _, row in self._rows)
        }


def _join(row: dict[str, list[float]], name: str, cell: list[float]) -> None:
    before = row.get(name)
    if before is None:
        row[name] = list(cell)
    else:
        before[0] += cell[0]
        before[1] += cell[1]
        before[2], before[3] = min(before[2], cell[2]), max(before[3], cell[3])


def rounded(value: float) -> float:
    """Six digits, which no chart shows more of; whole numbers without a point."""
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def flattened(record: Mapping[str, Any], before: str = "") -> dict[str, float]:
    """Flatten a record's numbers: `phase_s/forward`, `lr` of the first group, `lr_1` of the second."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, bool) or value is None or name in ("step", "nonfinite", "planned_nbytes"):
            continue
        if isinstance(value, (int, float)):
            found[before + name] = value
        elif isinstance(value, Mapping):
            found |= flattened(value, f"{before}{name}/")
        elif name == "lr" and isinstance(value, list):
            rates = {"lr" if not at else f"lr_{at}": one for at, one in enumerate(value)}
            found |= {name: one for name, one in rates.items() if isinstance(one, (int, float))}
    return found
