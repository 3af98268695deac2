"""The list of DeepSpeed's tests that reach into private parts, and the counts of `make test-deepspeed-suite`."""

from __future__ import annotations

import json
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

from suite_list import groups, patterns, reason_of
from suite_page import page, rows_of

SUITE = Path(__file__).parents[2] / "deepspeed_suite"
PATTERNS = [pattern for pattern, _ in patterns()]
RECORDED = json.loads((SUITE / "real_outcomes.json").read_text(encoding="utf-8"))
NAMES = {f"{file}::{case.partition('[')[0]}" for file, cases in RECORDED["passed"].items() for case in cases}


def test_every_group_has_a_reason() -> None:
    assert all(group["reason"].strip() and group["tests"] for group in groups())


def test_no_test_is_listed_twice() -> None:
    assert max(Counter(PATTERNS).values()) == 1
    twice = {name: found for name in NAMES if len(found := [one for one in PATTERNS if fnmatchcase(name, one)]) > 1}
    assert twice == {}


def test_every_pattern_is_one_of_a_test_that_passes_under_the_real_package() -> None:
    assert [one for one in PATTERNS if not any(fnmatchcase(name, one) for name in NAMES)] == []


def test_a_listed_test_that_passes_counts_as_one_of_public_behaviour() -> None:
    listed = f"unit/{next(name for name in sorted(NAMES) if reason_of(f'unit/{name}'))}"
    others = [f"unit/none/test_none.py::{name}" for name in ("test_public", "test_missing")]
    rows = rows_of([listed, f"{listed}[2]", *others], {listed: "passed", others[0]: "passed"})
    assert [*rows.values()] == [[2, 1, 1, 1], [2, 0, 2, 1]]
    assert "| all | 4 | 1 | 3 | 2 |" in page(rows, "Today.")
