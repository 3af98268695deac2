"""Record which functions of polyaccel a thread calls, in the order of their first calls."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import polyaccel

ROOT = Path(polyaccel.__file__).parent


@contextmanager
def called_functions() -> Iterator[list[tuple[str, int]]]:
    """Yield a list that gets, after the block, each called function: file below `polyaccel/`, first line."""
    found: dict[tuple[str, int], None] = {}
    calls: list[tuple[str, int]] = []
    folder = f"{ROOT}/"

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(folder):
            found.setdefault((file[len(folder) :], frame.f_code.co_firstlineno), None)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        calls.extend(found)


@cache
def first_lines(file: str) -> dict[str, int]:
    """Return the first line of each function of a file below `polyaccel/`, decorators included, by qualified name."""
    lines: dict[str, int] = {}
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        members = [(f"{node.name}.", each) for each in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        for prefix, each in members:
            if isinstance(each, ast.FunctionDef):
                lines[prefix + each.name] = min([each.lineno, *(part.lineno for part in each.decorator_list)])
    return lines


def differences(steps: Sequence[Sequence[str]], calls: Sequence[tuple[str, int]]) -> list[str]:
    """Return how `calls` differ from `steps` (file, function, ...): functions never called, or in another order."""
    order = {call: index for index, call in enumerate(calls)}
    problems, last = [], -1
    seen = set[tuple[str, int]]()
    for file, function, *_ in steps:
        call = file, first_lines(file)[function]
        if call not in order:
            problems.append(f"never called: {file} {function}")
        elif call not in seen:
            if order[call] < last:
                problems.append(f"called before the step above it: {file} {function}")
            last = max(last, order[call])
        seen.add(call)
    return problems
