"""The support table, from docs/support.toml.

`python docs/generate/support_table.py` renews it in docs/support.md, between its two markers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"

Rows: TypeAlias = Mapping[str, Mapping[str, str]]
"""By name, the `state` of a plugin, `what` it is for and `where` it is tested."""

_STATES = {
    "run": "tested: {where}",
    "apart": "tested in a separate environment: `{where}`",
    "unrun": "written to `{where}`, **not run on hardware**",
}
_TITLES = {"accelerators": "accelerator", "comm": "comm backend"}


def support() -> Mapping[str, Any]:
    """What the file says: `engine` by feature, and the `Rows` of each group of plugins."""
    return tomllib.loads((ROOT / "docs" / "support.toml").read_text(encoding="utf-8"))


def support_table() -> str:
    """All of it as Markdown tables."""
    said = support()
    engine = "\n".join(
        ["| | state |", "|---|---|", *(f"| {what} | {state} |" for what, state in said["engine"].items())]
    )
    return "\n\n".join([engine, *(_table(title, said[group]) for group, title in _TITLES.items())])


def with_table(document: str) -> str:
    """`document` with the present table between the markers. Raises ValueError where one is missing."""
    head, rest = document[: document.index(BEGIN)], document[document.index(END) :]
    return f"{head}{BEGIN}\n{support_table()}\n{rest}"


def _table(title: str, rows: Rows) -> str:
    lines = [f"| {title} | for | state |", "|---|---|---|"]
    for name, row in rows.items():
        lines.append(f"| `{name}` | {row['what']} | {_STATES[row['state']].format(**row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
