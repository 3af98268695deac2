"""The page of all notes in the code, so that their explanations are found without the code at hand.

A definition is a line of a docstring or comment that holds nothing but `[Note: Title]`. `python docs/generate/notes.py`
prints the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("polyaccel", "csrc", "plugins")
_DEFINITION = re.compile(r"^(?:// |# |\s*)?\[Note: ([^\]]+)\]$", re.MULTILINE)


def definitions() -> Iterator[tuple[str, Path]]:
    """Yield each note's title and its file, relative to the repository, in the order of files."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in {".py", ".h", ".cpp"} and {"tests", "build"}.isdisjoint(file.relative_to(ROOT).parts):
                for title in _DEFINITION.findall(file.read_text(encoding="utf-8")):
                    yield title, file.relative_to(ROOT)


def notes() -> str:
    """Return the tables of the page, as Markdown: one for each package."""
    lines = list[str]()
    part = ""
    for title, file in definitions():
        package = "/".join(file.parts[:2])
        if package != part:
            lines += [f"\n## {package}\n", "| note | module |", "|---|---|"]
            part = package
        lines.append(f"| {title} | [{file.stem}](../../{file}) |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(notes())
