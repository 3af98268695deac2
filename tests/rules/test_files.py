"""What holds for every file of the project's own code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("polyaccel", "examples", "bench")
FILES = {
    file.relative_to(ROOT).as_posix(): file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))
}
MOST_LINES = 400


def test_no_file_holds_two_things() -> None:
    long = [name for name, file in FILES.items() if len(file.read_text(encoding="utf-8").splitlines()) > MOST_LINES]
    assert not long


@pytest.mark.parametrize("name", FILES)
def test_a_module_says_what_it_is(name: str) -> None:
    module = ast.parse(FILES[name].read_text(encoding="utf-8"))
    assert not module.body or ast.get_docstring(module)
