"""The page on architecture: a picture of the layers, from import-linter's contract, and the walks of docs/walks.toml.

Run `python docs/generate/architecture.py` to renew docs/architecture.md and docs/layers.svg.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

DOCS = Path(__file__).parents[1]
_HEAD = """\
# Architecture

Packages of `polyaccel` form layers. A package imports from the layers below it and from none above; `make lint` checks
it. [Packages](packages.md) has a line on each, and [the decisions](adr/index.md) have the reasons.

![Packages of polyaccel in layers](layers.svg)

## Where a value passes

Five walks follow one value through the code, and two follow a checkpoint out and back. Each row is a function that the
value passes, in the order of the first calls. A test runs each walk and compares.
"""
_WIDTH, _ROW, _GAP, _TEXT = 760, 34, 6, 13


def read_walks() -> list[dict[str, Any]]:
    """Return the walks of docs/walks.toml."""
    walks: list[dict[str, Any]] = tomllib.loads((DOCS / "walks.toml").read_text(encoding="utf-8"))["walk"]
    return walks


def steps_of(walk: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return all steps of a walk: file below `polyaccel/`, function, sentence."""
    return [(file, function, text) for file, function, text in (*walk["steps"], *walk.get("rank_steps", ()))]


def page() -> str:
    """Return docs/architecture.md."""
    parts = [_HEAD]
    for walk in read_walks():
        steps = steps_of(walk)
        files = len({file for file, _, _ in steps})
        parts.append(f"\n### {walk['title']}\n\n{len(steps)} functions in {files} files.\n")
        parts.append("| step | function | what it does |\n|---|---|---|")
        rows = [
            f"| {number} | [{function}](../polyaccel/{file}) | {text} |"
            for number, (file, function, text) in enumerate(steps, 1)
        ]
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def layers() -> list[list[str]]:
    """Return the layers of packages, the highest first, as `make lint` checks them."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(each for each in project["tool"]["importlinter"]["contracts"] if each["type"] == "layers")
    return [[name.strip(" ()") for name in layer.split("|")] for layer in contract["layers"]]


def picture() -> str:
    """Return docs/layers.svg: a row a layer, a box a package."""
    rows = layers()
    height = len(rows) * (_ROW + _GAP) + _GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        "<title>Packages of polyaccel in layers, the highest first</title>",
        f'<g font-family="sans-serif" font-size="{_TEXT}" text-anchor="middle">',
    ]
    for index, names in enumerate(rows):
        top = _GAP + index * (_ROW + _GAP)
        width = (_WIDTH - _GAP * (len(names) + 1)) / len(names)
        for column, name in enumerate(names):
            left = _GAP + column * (width + _GAP)
            lines.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW}" rx="4" fill="#e8eaf6" '
                f'stroke="#3f51b5"/><text x="{left + width / 2:.1f}" y="{top + _ROW / 2 + _TEXT / 3:.1f}" '
                f'fill="#1a237e">{name}</text>'
            )
    return "\n".join([*lines, "</g>", "</svg>", ""])


if __name__ == "__main__":
    (DOCS / "architecture.md").write_text(page(), encoding="utf-8")
    (DOCS / "layers.svg").write_text(picture(), encoding="utf-8")
