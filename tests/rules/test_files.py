"""What holds for every file of the project's own code."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "generate"))

from google_docstring import section_lines  # noqa: E402

FOLDERS = ("polyaccel", "examples", "bench")
FILES = {
    file.relative_to(ROOT).as_posix(): file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))
}
MOST_LINES = 400


def test_no_file_holds_two_things() -> None:
    lengths = {name: _lines(file.read_text(encoding="utf-8")) for name, file in FILES.items()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_the_example_that_make_train_runs_stays_small() -> None:
    files = [file for name, file in FILES.items() if name.startswith("examples/gpt/")]
    assert 0 < sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 300


def test_a_module_says_what_it_is() -> None:
    modules = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in FILES.items()}
    assert [name for name, module in modules.items() if module.body and not ast.get_docstring(module)] == []


def test_a_test_file_has_a_name_of_its_own() -> None:
    """pytest imports test files by their names alone, without folders."""
    counts = Counter(file.name for shelf in ("tests", "plugins") for file in (ROOT / shelf).rglob("test_*.py"))
    assert {name: count for name, count in counts.items() if count > 1} == {}


def _lines(text: str) -> int:
    """The lines of a file without the sections of its docstrings, which grow with the parameters and not with code."""
    lines = len(text.splitlines())
    if lines <= MOST_LINES:
        return lines
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return lines - sum(section_lines(doc) for node in nodes if (doc := ast.get_docstring(node)))
