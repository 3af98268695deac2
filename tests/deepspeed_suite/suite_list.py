"""Which of DeepSpeed's tests reach into private parts, and why: `private.toml` has patterns of node ids by reason."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info < (3, 11):
    import tomli as tomllib
else:
    import tomllib

LIST = Path(__file__).with_name("private.toml")


@cache
def patterns() -> tuple[tuple[str, str], ...]:
    """Return every pattern with its reason, in the order of the file."""
    return tuple((pattern, group["reason"]) for group in groups() for pattern in group["tests"])


@cache
def groups() -> tuple[dict[str, Any], ...]:
    """Return the groups of the file: a reason, and the patterns of tests that it holds for."""
    return tuple(tomllib.loads(LIST.read_text(encoding="utf-8"))["group"])


def reason_of(case: str) -> str:
    """Return why a test counts as one of private parts; "" if it does not.

    Args:
        case: A node id below `unit/`, such as `unit/moe/test_moe.py::TestMoE::test[1-2]`.

    Returns:
        The reason.
    """
    name = case.partition("[")[0].removeprefix("unit/")
    return next((reason for pattern, reason in patterns() if fnmatchcase(name, pattern)), "")
