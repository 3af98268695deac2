"""What holds for every file of the project's own code."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("polyaccel", "examples", "bench")
FILES = {
    file.relative_to(ROOT).as_posix(): file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))
}
MOST_LINES = 400


def test_no_file_holds_two_things() -> None:
    long = [name for name, file in FILES.items() if len(file.read_text(encoding="utf-8").splitlines()) > MOST_LINES]
    assert not long


def test_a_module_says_what_it_is() -> None:
    modules = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in FILES.items()}
    assert [name for name, module in modules.items() if module.body and not ast.get_docstring(module)] == []


def test_a_test_file_has_a_name_of_its_own() -> None:
    """pytest imports test files by their names alone, without folders."""
    counts = Counter(file.name for shelf in ("tests", "plugins") for file in (ROOT / shelf).rglob("test_*.py"))
    assert {name: count for name, count in counts.items() if count > 1} == {}
