"""Contract suites: classes whose methods `test_*` are tests, for pytest and for `polyaccel plugins check`.

A test passes by returning, is skipped by `unittest.SkipTest` (which pytest understands too) where it is about an
ability that the plugin does not claim, and fails by any other exception. Its docstring is one sentence on what it wants
and why. No suite needs pytest.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal
from unittest import SkipTest

from polyaccel.errors import LaunchError, PolyaccelError

TIMEOUT_S = 30.0
"""How long a row may take, counted from the last thing that it announced."""
_MOST_LINES = 6


class BrokenPromise(AssertionError):
    """A test that failed, with a hint on the cure."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(f"{message}\n  hint: {hint}")
        self.message, self.hint = message, hint


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of one test. `reason` has why it failed or was skipped, in few lines, `hint` the hint of the error,
    and `traceback` has the rest."""

    test: str
    state: Literal["ok", "failed", "skipped"]
    seconds: float
    reason: str = ""
    hint: str = ""
    traceback: str = ""


@dataclass
class CheckRow:
    """One test of a suite that has not run yet. `wants` is the sentence of its docstring; `outcome` is there once
    `run` was called."""

    suite: str
    test: str
    wants: str
    act: Callable[[], CheckOutcome]
    outcome: CheckOutcome | None = field(default=None)

    @property
    def title(self) -> str:
        return self.test.removeprefix("test_").replace("_", " ")

    @property
    def has_failed(self) -> bool:
        return self.outcome is not None and self.outcome.state == "failed"

    def run(self) -> CheckOutcome:
        self.outcome = self.act()
        return self.outcome


def list_tests(contract: type) -> tuple[str, ...]:
    """The names of a suite's tests, in the order in which they are written, those of base classes first."""
    names = [name for cls in reversed(contract.__mro__) for name in vars(cls) if name.startswith("test_")]
    return tuple(name for name in dict.fromkeys(names) if callable(getattr(contract, name)))


def wanted_by(contract: type, test: str) -> str:
    """What a test wants and why: its docstring, on one line."""
    return " ".join((inspect.getdoc(getattr(contract, test)) or "").split())


def run_test(name: str, test: Callable[[], object]) -> CheckOutcome:
    """Run one test. Everything but Ctrl-C is an outcome."""
    begin = perf_counter()
    try:
        test()
    except KeyboardInterrupt:
        raise
    except SkipTest as skip:
        return CheckOutcome(name, "skipped", perf_counter() - begin, reason_of(skip))
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        hint = error.hint if isinstance(error, (PolyaccelError, BrokenPromise)) else ""
        return CheckOutcome(name, "failed", perf_counter() - begin, reason_of(error), hint, trace)
    return CheckOutcome(name, "ok", perf_counter() - begin)


def reason_of(error: BaseException) -> str:
    """The message of `error`, in few lines, with its type unless that adds nothing: an assertion, a skip, a process
    that died. A bare assertion is shown itself."""
    text = error.message if isinstance(error, (PolyaccelError, BrokenPromise)) else str(error)
    said = "\n".join([line.strip() for line in text.splitlines() if line.strip()][:_MOST_LINES])
    if isinstance(error, AssertionError) and not said:
        frames = traceback.extract_tb(error.__traceback__)
        said = (frames[-1].line or "") if frames else ""
    if isinstance(error, (AssertionError, SkipTest, LaunchError)) and said:
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
