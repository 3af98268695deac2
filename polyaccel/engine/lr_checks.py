"""Checks of a schedule's parameters: collects everything that is wrong, and reports it in one ConfigError."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from polyaccel.errors import ConfigError, Problem


class ParameterChecks:
    """Collects problems with the parameters of one schedule, under the dotted keys `scheduler.params.*`.

    Each check gives back a usable value, or a stand-in for one when it found a problem; `done` raises for all of them.
    """

    def __init__(self) -> None:
        self._problems: list[Problem] = []

    def refuse(self, key: str, value: object, expected: str, hint: str = "") -> None:
        self._problems.append(Problem(f"scheduler.params.{key}", value, expected, hint))

    def done(self) -> None:
        """Raise ConfigError if any check failed."""
        if self._problems:
            raise ConfigError(self._problems)

    def number(self, key: str, value: object, *, below: float | None = None) -> float:
        """A finite number of at least 0, and under `below` where that is given."""
        # bool is an int, and a True that means 1.0 is a mistake.
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(key, value, "expected a number")
        elif not isfinite(value) or value < 0 or (below is not None and value >= below):
            limit = "" if below is None else f" and less than {below}"
            self.refuse(key, value, f"expected a finite number of at least 0{limit}")
        else:
            return float(value)
        return 0.0

    def numbers(self, key: str, value: object, *, groups: int, below: float | None = None) -> list[float]:
        """One number for each of the `groups` optimizer groups, from one number for all or from a list of as many."""
        if not isinstance(value, Sequence) or isinstance(value, str):
            return [self.number(key, value, below=below)] * groups
        if len(value) != groups:
            hint = f"give one number for all groups, or {groups}"
            self.refuse(key, value, f"{len(value)} numbers for {groups} optimizer groups", hint)
            return [0.0] * groups
        return [self.number(f"{key}[{index}]", item, below=below) for index, item in enumerate(value)]

    def integer(self, key: str, value: object, *, least: int) -> int:
        """A whole number of at least `least`."""
        if isinstance(value, bool) or not isinstance(value, int):
            hint = f"write {int(value)}" if isinstance(value, float) and value.is_integer() else ""
            self.refuse(key, value, "expected a whole number", hint)
        elif value < least:
            self.refuse(key, value, f"expected at least {least}")
        else:
            return value
        return max(1, least)

    def flag(self, key: str, value: object) -> bool:
        if not isinstance(value, bool):
            self.refuse(key, value, "expected true or false")
        return value is True

    def ordered(self, low: str, lows: Sequence[float], high: str, highs: Sequence[float]) -> None:
        """`lows` must not exceed `highs`, group by group."""
        if any(small > large for small, large in zip(lows, highs, strict=True)):
            self.refuse(low, list(lows), f"is more than {high} = {list(highs)}", "swap the two")
