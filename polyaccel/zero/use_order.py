"""The order in which sharded buckets are used, learned in one step and expected in the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from logging import INFO, WARNING, getLogger
from math import inf

log = getLogger(__name__)


class UseOrder:
    """The order in which buckets were held in the last step, and where the present step stands in it."""

    def __init__(self, numels: Mapping[int, int], *, warn: bool) -> None:
        self._numels = numels
        self._warn = warn
        self._learned: list[int] = []
        self._present: list[int] = []
        self._position = 0
        self._has_deviated = False
        self._is_changing = self._may_deviate = False

    def note(self, index: int) -> None:
        """Bucket `index` is used now."""
        self._present.append(index)
        if not self._learned:
            return
        try:
            expected = self._learned.index(index, self._position)
        except ValueError:
            expected = -1
        if expected != self._position and not self._has_deviated and not self._may_deviate:
            self._has_deviated = True
            level = WARNING if self._warn else INFO
            log.log(level, "buckets are used in another order than in the last step; they are gathered on demand")
        if expected >= 0:
            self._position = expected + 1

    def upcoming(self) -> Iterator[int]:
        """The buckets that come next, nearest first, if the order holds."""
        yield from self._learned[self._position :]

    def distance(self, index: int) -> float:
        """Elements that will be used before bucket `index` is; infinite if it is not expected again."""
        passed = 0
        for upcoming in self.upcoming():
            if upcoming == index:
                return passed
            passed += self._numels[upcoming]
        return inf

    def end_step(self) -> None:
        """The step is over: expect its order from now on."""
        if self._present:
            self._learned, self._present = self._present, []
        self._position = 0
        self._has_deviated &= not self._warn
        self._may_deviate, self._is_changing = self._is_changing, False

    def will_change(self) -> None:
        """A use was found out in this step, and will come earlier in the next one: no reason to tell anybody."""
        self._is_changing = True
