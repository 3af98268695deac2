"""Each function, config key, command and page that docs/reference/tasks.md names exists."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

from polyaccel.cli.main import full_parser
from polyaccel.config import Config
from polyaccel.config.keys import walk_keys
from polyaccel.jax.engine import JaxEngine
from polyaccel.torch.engine.torch_engine import TorchEngine

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "tasks.md"
SECTIONS = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
HEAD = ["you want", "script", "config", "command", "page"]


def rows(section: str) -> list[list[str]]:
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, rule, *found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert head == HEAD
    assert set(rule) == {"---"}
    assert found
    return found


def names(column: int, section: str) -> set[str]:
    return {name for row in rows(section) for name in re.findall(r"`([^`]+)`", row[column])}


def test_each_function_exists() -> None:
    for section in SECTIONS:
        engine = JaxEngine if section.startswith("JAX\n") else TorchEngine
        found = names(1, section)
        assert found
        for name in found:
            owner, _, attribute = name.rpartition(".")
            assert hasattr(engine if owner == "engine" else import_module(owner), attribute), name


def test_each_key_and_command_exists() -> None:
    keys = {key.dotted for key in walk_keys(Config)}
    assert {name for section in SECTIONS for name in names(2, section)} - keys == set()
    commands = {name for section in SECTIONS for name in names(3, section)}
    assert len(commands) > 15
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "polyaccel"
        full_parser().parse_args(arguments)


def test_each_row_names_a_page_and_something_to_use() -> None:
    for row in (row for section in SECTIONS for row in rows(section)):
        assert any(row[1:4]), row
        (link,) = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", row[4])
        assert (PAGE.parent / link).is_file(), row
