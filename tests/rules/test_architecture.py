"""The page on architecture has what docs/walks.toml and the import contract say, and walks are as short as agreed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "generate"))

import architecture  # noqa: E402

WALKS = architecture.read_walks()


@pytest.mark.parametrize("name", ["architecture.md", "layers.svg"])
def test_the_page_is_up_to_date(name: str) -> None:
    wanted = architecture.page() if name == "architecture.md" else architecture.picture()
    found = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert found == wanted, "renew it: python docs/generate/architecture.py"


@pytest.mark.parametrize("walk", WALKS, ids=[walk["name"] for walk in WALKS])
def test_a_walk_names_functions_and_is_short(walk: dict[str, object]) -> None:
    steps = architecture.steps_of(walk)
    assert len({file for file, _, _ in steps}) <= walk["most_files"]
    for file, function, _ in steps:
        tree = ast.parse((ROOT / "polyaccel" / file).read_text(encoding="utf-8"))
        names = set[str]()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        assert function in names, f"{file} has no {function}"
