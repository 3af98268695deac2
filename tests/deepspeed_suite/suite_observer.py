"""A plugin of pytest for DeepSpeed's tests: keeps few cases of each test and writes every outcome at once.

DeepSpeed's tests start a pool of ranks each. Its pools come from a server that has torch and deepspeed loaded already,
or a test would spend ten seconds on imports. Nothing that a test asserts is touched.
"""

from __future__ import annotations

import json
import os
import traceback
from collections import Counter
from functools import wraps
from importlib.util import find_spec
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import pytest

OUTCOMES = Path(os.environ["SUITE_OUTCOMES"])
CASES = int(os.environ.get("SUITE_CASES", "2"))
# The cases to run, where not all of them are wanted.
ONLY = frozenset(Path(os.environ["SUITE_ONLY"]).read_text("utf-8").split("\n") if os.environ.get("SUITE_ONLY") else ())
TEXT = 3000
IS_OURS = find_spec("polyaccel_deepspeed") is not None


def _done() -> set[str]:
    """Return the cases that have an outcome: the suite starts pytest again after a test that it had to end."""
    rows = map(json.loads, OUTCOMES.read_text("utf-8").splitlines()) if OUTCOMES.exists() else ()
    return {row[1] for row in rows if row[0] == "end"}


def write(*row: object) -> None:
    """Append a row to the outcomes, in one write: ranks write there too."""
    with OUTCOMES.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def pytest_collectstart(collector: Any) -> None:
    """Make fixtures of a module's classes that are to run on ranks: newer releases of pytest take no classes."""
    if not isinstance(collector, pytest.Module):
        return
    try:
        module = collector.obj
    except BaseException:  # the module's collection reports it
        return
    for name, one in [*vars(module).items()]:
        if isinstance(one, type) and getattr(one, "is_dist_fixture", False) and getattr(one, "world_size", None):
            setattr(module, f"suite_fixture_{name}", _fixture_of(name, one))


def _fixture_of(name: str, kind: Any) -> Any:
    def make() -> Any:
        return kind()

    make.is_dist_fixture = True  # type: ignore[attr-defined]  # by which DeepSpeed's conftest finds it
    return pytest.fixture(name=name)(make)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the wanted cases, or the first of each test."""
    if kind := os.environ.get("SUITE_KIND"):
        items[:] = [item for item in items if getattr(item.cls, "is_dist_test", False) == (kind == "ranks")]
    done = _done()
    if ONLY:
        items[:] = [item for item in items if item.nodeid in ONLY - done]
        return
    seen: Counter[str] = Counter()
    kept = []
    for item in sorted(items, key=_needs_half_precision):
        seen[item.nodeid.split("[")[0]] += 1
        if seen[item.nodeid.split("[")[0]] <= CASES:
            kept.append(item)
    items[:] = [item for item in kept if item.nodeid not in done]


def _needs_half_precision(item: Any) -> bool:
    """Tell whether a case is of float16, which DeepSpeed has not on a CPU: the others of its test go first."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(str(value) in ("torch.float16", "fp16") for value in values)


_passed = set[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: Any, nextitem: Any) -> bool | None:
    """Pass over the further cases of a test of which one has passed, where the cases are chosen here."""
    if ONLY or item.nodeid.split("[")[0] not in _passed:
        return None
    # The test before this one kept what the two share: without this the next one would fail.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def pytest_runtest_logstart(nodeid: str) -> None:
    """Name the test that starts."""
    write("start", nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """Write an outcome."""
    if report.when == "call" or report.outcome != "passed":
        if report.outcome == "passed":
            _passed.add(report.nodeid.split("[")[0])
        text = "" if report.outcome == "passed" else str(report.longrepr)[-TEXT:]
        write("end", report.nodeid, report.outcome, round(report.duration, 1), text)


def pytest_collectreport(report: Any) -> None:
    """Write that a file cannot be imported."""
    if report.outcome == "failed":
        write("end", report.nodeid, "failed", 0, str(report.longrepr)[-TEXT:])


def stand_in_for_private_names() -> None:
    """Let tests import what the drop-in does not have, where this is the drop-in."""
    if IS_OURS:
        from private_names import let_tests_import

        let_tests_import()


def pytest_sessionstart() -> None:
    """Load what ranks load, here and in the server that forks them."""
    import suite_ranks  # noqa: F401

    set_forkserver_preload(["suite_observer", "suite_ranks"])


def report_errors(run: Any) -> Any:
    """Let a rank write its error at once: the others may wait for it, and the test would never end."""

    @wraps(run)  # a pool sends the method by its name
    def reported(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(self, *args, **kwargs)
        except BaseException:
            write("rank", traceback.format_exc()[-TEXT:])
            raise

    return reported
