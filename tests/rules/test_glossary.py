"""The glossary: each entry leads to code that has the name, and no other name for the same thing is in use."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
ROW = re.compile(
    r"^\| \*\*(?P<term>[^*]+)\*\* \| (?P<meaning>[^|]+) \| "
    r"\[(?P<name>[\w.]+)\]\((?P<file>[^)]+)\) \|(?P<avoid>[^|]*)\|$"
)
ROWS = [row for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if (row := ROW.match(line))]


@cache
def names_in(file: Path) -> frozenset[str]:
    """Classes, functions and assigned names of a module, methods as `Class.method`."""
    found = set[str]()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return frozenset(found)


def test_each_line_of_a_table_is_an_entry() -> None:
    lines = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("| **")]
    assert len(lines) == len(ROWS) == len({row["term"] for row in ROWS})
    assert 40 <= len(ROWS) <= 70


@pytest.mark.parametrize("row", ROWS, ids=[row["term"] for row in ROWS])
def test_an_entry_leads_to_its_code(row: re.Match[str]) -> None:
    assert row["name"] in names_in((GLOSSARY.parent / row["file"]).resolve())


def test_no_other_name_is_in_use() -> None:
    avoided = {word.strip() for row in ROWS for word in row["avoid"].split(",")} - {""}
    assert len(avoided) > 20
    for folder in ("polyaccel", "plugins"):
        for file in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            used = {getattr(node, key, None) for node in ast.walk(tree) for key in ("id", "name", "attr")}
            assert not used & avoided, file
