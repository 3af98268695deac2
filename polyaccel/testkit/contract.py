"""Contract suites: classes whose methods `test_*` are tests, for pytest and for `polyaccel plugins check`.

A test passes by returning, is skipped by `unittest.SkipTest` (which pytest understands too) where it is about an
ability that the plugin does not claim, and fails by any other exception. No suite needs pytest.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Literal
from unittest import SkipTest

from polyaccel.errors import PolyaccelError


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of one test. `reason` is the first line of why it failed or was skipped, `traceback` the rest."""

    test: str
    state: Literal["ok", "failed", "skipped"]
    seconds: float
    reason: str = ""
    traceback: str = ""


def list_tests(contract: type) -> tuple[str, ...]:
    """The names of a suite's tests, in the order in which they are written, those of base classes first."""
    names = [name for cls in reversed(contract.__mro__) for name in vars(cls) if name.startswith("test_")]
    return tuple(name for name in dict.fromkeys(names) if callable(getattr(contract, name)))


def run_test(name: str, test: Callable[[], object]) -> CheckOutcome:
    """Run one test. Everything but Ctrl-C is an outcome."""
    begin = perf_counter()
    try:
        test()
    except KeyboardInterrupt:
        raise
    except SkipTest as skip:
        return CheckOutcome(name, "skipped", perf_counter() - begin, first_line(skip))
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        return CheckOutcome(name, "failed", perf_counter() - begin, first_line(error), trace)
    return CheckOutcome(name, "ok", perf_counter() - begin)


def refused(action: Callable[[], object], what: str) -> None:
    """Check that `action` raises an error of ours."""
    try:
        action()
    except PolyaccelError:
        return
    raise AssertionError(f"{what} was accepted")


def first_line(error: BaseException) -> str:
    """The first line of what `error` says that is not empty, with its type unless it is an assertion or a skip.

    numpy's comparisons begin with how they compared: of those the line that follows. A bare assertion is shown itself.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith(("Arrays are not", "Not equal to tolerance")):
        del lines[0]
    said = lines[0] if lines else ""
    if isinstance(error, AssertionError) and not said:
        frames = traceback.extract_tb(error.__traceback__)
        said = (frames[-1].line or "") if frames else ""
    if isinstance(error, (AssertionError, SkipTest)) and said:
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
