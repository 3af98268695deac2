"""Google-style docstrings, split into prose and sections. Read first: `split`, `Docstring`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from inspect import cleandoc

NAMED = ("Args", "Attributes", "Raises")
"""Sections whose entries have names."""
PLAIN = ("Returns", "Yields")
"""Sections that describe one value."""
_HEAD = re.compile(rf"^({'|'.join((*NAMED, *PLAIN))}):$")
_ENTRY = re.compile(r"^(?P<name>[\w.*, ]+?)(?: \([^)]*\))?: +(?P<text>.*)$")


@dataclass(frozen=True)
class Docstring:
    """A docstring in parts.

    Attributes:
        prose: Summary and paragraphs, without the sections.
        named: By section of `NAMED`, the text of each entry by its name, stars included (`*args`).
        plain: By section of `PLAIN`, its text.
    """

    prose: str = ""
    named: dict[str, dict[str, str]] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)


def split(text: str | None) -> Docstring:
    """Split a docstring at its section heads, which stand at its left margin.

    Args:
        text: The docstring as written, indentation included; None without one.

    Returns:
        The parts. The lines of an entry are joined by spaces.
    """
    prose: list[str] = []
    found: dict[str, list[str]] = {}
    lines = prose
    for line in cleandoc(text or "").splitlines():
        head = _HEAD.match(line)
        if head is not None:
            lines = found.setdefault(head[1], [])
        elif line and lines is not prose and not line.startswith(" "):
            lines = prose  # a paragraph after the sections
            lines += ["", line]
        else:
            lines.append(line)
    return Docstring(
        prose="\n".join(prose).strip(),
        named={name: _entries(found[name]) for name in NAMED if name in found},
        plain={name: " ".join(" ".join(found[name]).split()) for name in PLAIN if name in found},
    )


def section_lines(text: str) -> int:
    """Count the lines of the sections, heads and the empty lines before them included.

    Args:
        text: The docstring as written.

    Returns:
        The number of lines that are not prose.
    """
    return len(cleandoc(text).splitlines()) - len(split(text).prose.splitlines())


def _entries(lines: list[str]) -> dict[str, str]:
    entries: dict[str, str] = {}
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    name = ""
    for line in lines:
        entry = _ENTRY.match(line.strip()) if len(line) - len(line.lstrip()) == margin else None
        if entry is not None:
            name = entry["name"]
            entries[name] = entry["text"]
        elif line.strip() and name:
            entries[name] += f" {line.strip()}"
    return entries
