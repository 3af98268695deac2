"""Robust statistics of the last values: medians and their absolute deviations, which a few wild values do not move."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import log
from statistics import median

NORMAL = 1.4826
"""The standard deviation of normal noise by its median absolute deviation."""


class Window:
    """The last values of a figure, and how far a new one lies above them.

    `length` values are looked at, and nothing is reported before half of them are there. `least_spread` is what counts
    as noise in any case, as a share of the median.
    """

    def __init__(self, length: int, least_spread: float) -> None:
        self._values: deque[float] = deque(maxlen=length)
        self._least_count = max(2, length // 2)
        self._least_spread = least_spread

    @property
    def median(self) -> float:
        """Of the last values; 0 without one."""
        return median(self._values) if self._values else 0.0

    def rise(self, value: float) -> float:
        """How many deviations `value` lies above the median; 0 while there are too few values, and for one below it.

        Where all are positive, as losses and norms are, the smaller one of the count in values and of that in their
        logarithms: skew is not an alarm. The value itself is not taken into the window; see `add`.
        """
        if len(self._values) < self._least_count:
            return 0.0
        middle = self.median
        if value <= middle:
            return 0.0
        rise = _deviations(self._values, value, self._least_spread * abs(middle))
        if rise > 0 and min(self._values) > 0:
            rise = min(rise, _deviations([log(one) for one in self._values], log(value), self._least_spread))
        return max(0.0, rise)

    def add(self, value: float) -> None:
        """Take `value` into the window."""
        self._values.append(value)


def _deviations(values: Sequence[float] | deque[float], value: float, least: float) -> float:
    middle = median(values)
    spread = NORMAL * median(abs(one - middle) for one in values)
    return (value - middle) / max(spread, least, 1e-300)


_GROUPS, _IN_GROUP, _LEVELS = 4, 4, 3


class MonotonicGrowth:
    """Whether a figure creeps up: at some time scale its last sixteen values fall into four groups in a row, each
    wholly above the one before.

    Of values that only scatter one sixteen in 60 million looks like that. Each scale has the least of four values of
    the finer one, so what comes and goes is not seen.
    """

    def __init__(self) -> None:
        self._levels: list[deque[float]] = [deque(maxlen=_GROUPS * _IN_GROUP) for _ in range(_LEVELS)]
        self._taken = [0] * _LEVELS

    def add(self, value: float) -> tuple[float, float, int] | None:
        """Add a value; return the least of first and last group, and the values between, where it creeps."""
        scale, found = 1, None
        for level, values in enumerate(self._levels):
            values.append(value)
            self._taken[level] += 1
            if found is None and (ends := _steps_up(values)) is not None:
                found = (*ends, scale * _IN_GROUP * (_GROUPS - 1))
            if self._taken[level] % _IN_GROUP:
                break
            value = min(list(values)[-_IN_GROUP:])
            scale *= _IN_GROUP
        return found


def _steps_up(values: deque[float]) -> tuple[float, float] | None:
    if len(values) < _GROUPS * _IN_GROUP:
        return None
    given = list(values)
    groups = [given[at : at + _IN_GROUP] for at in range(0, len(given), _IN_GROUP)]
    is_up = all(min(after) > max(before) for before, after in pairwise(groups))
    return (min(groups[0]), min(groups[-1])) if is_up else None
