"""Time limits: that of a job's start, which ends all waiting that a rank does until all ranks have joined, and that of
a call into code that heeds no limit of ours."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from time import monotonic
from typing import Generic, TypeVar

from polyaccel.errors import CommTimeout

T = TypeVar("T")
_LEAST_S = 0.001  # libraries take 0 to mean no limit, or refuse it


class Deadline:
    """The end of a time of `timeout_s` seconds that began at `began_s` (time.monotonic), or now."""

    def __init__(self, timeout_s: float, began_s: float | None = None) -> None:
        self.timeout_s = timeout_s
        self._end_s = (monotonic() if began_s is None else began_s) + timeout_s

    @property
    def is_over(self) -> bool:
        return monotonic() >= self._end_s

    def remaining_s(self) -> float:
        """Seconds until the end; a millisecond once it has passed."""
        return max(_LEAST_S, self._end_s - monotonic())

    def remaining(self) -> timedelta:
        """`remaining_s` as torch takes it."""
        return timedelta(seconds=self.remaining_s())

    def run(self, waits_for: str, action: Callable[[], T]) -> T:
        """Run `action()` within the time left, as `run_within`. Raises CommTimeout, which names `waits_for`."""
        try:
            return run_within(self.remaining_s(), action)
        except DeadlineExceeded:
            raise CommTimeout(
                f"timed out after {self.timeout_s:g} s waiting for {waits_for}",
                hint="look for the first error among the ranks, and for what listens at that place",
                value=waits_for,
            ) from None


class DeadlineExceeded(Exception):
    """An action had not ended at its limit, and continues in a thread that was left behind. `stack` is where it was."""

    def __init__(self, stack: traceback.StackSummary) -> None:
        super().__init__()
        self.stack = stack


def run_within(limit_s: float, action: Callable[[], T]) -> T:
    """`action()`, in a thread that is left behind after `limit_s` seconds. Raises what `action` raises, and Overdue."""
    attempt = _Attempt(action)
    attempt.start()
    attempt.join(limit_s)
    if attempt.is_alive():
        frame = sys._current_frames().get(attempt.ident or 0)
        raise DeadlineExceeded(traceback.extract_stack(frame) if frame is not None else traceback.StackSummary())
    return attempt.result()


class _Attempt(Thread, Generic[T]):
    def __init__(self, action: Callable[[], T]) -> None:
        super().__init__(daemon=True, name="polyaccel attempt")
        self._action = action
        self._outcome: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._outcome.append(self._action())
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._outcome[0]
