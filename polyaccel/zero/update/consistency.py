"""The record of a change that failed in the middle.

[Note: Partial update]
Something may fail when some buckets have been updated or loaded and others not: a rank is lost, a file cannot be read.
What is in memory then belongs to two steps, and nothing may be trained on or saved from it until a checkpoint has been
loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polyaccel.errors import PolyaccelError


class Consistency:
    """Whether parameters and optimizer states are those of one step. See [Note: Partial update]."""

    def __init__(self) -> None:
        self._failed, self._value = "", None

    def require(self) -> None:
        """Raise PolyaccelError where a change failed in the middle."""
        if self._failed:
            raise PolyaccelError(
                f"{self._failed} failed in the middle: parameters and optimizer states are not those of one step",
                hint="load the last checkpoint, with its optimizer states",
                value=self._value,
            )

    def mark_inconsistent(self, what: str, value: Any = None) -> None:
        """Let `require` raise until `mark_consistent`: `what` failed, or would if it ended now."""
        self._failed, self._value = what, value

    def mark_consistent(self) -> None:
        """All parameters and optimizer states are those of one step again."""
        self._failed, self._value = "", None

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Mark the state inconsistent where the block, which is `what`, raises."""
        try:
            yield
        except BaseException:
            self.mark_inconsistent(what, what)
            raise
