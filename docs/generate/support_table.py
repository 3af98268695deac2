"""The support tables, from docs/support.toml.

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
"""By name: of a plugin `state`, `what` it is for and `where` it is tested; of others a mark a place, and a `note`."""

_STATES = {
    "run": "tested: {where}",
    "apart": "tested in a separate environment: `{where}`",
    "unrun": "written to `{where}`, **not run on hardware**",
}
_TITLES = {"accelerators": "accelerator", "comm": "comm backend"}
_PLACES = {
    "features": {"cpu": "CPU", "h100": "one H100"},
    "jobs": {"machine": "one machine", "namespaces": "two network namespaces", "cluster": "cluster, cloud"},
}
_MARKS = {"yes": "✓", "part": "(✓)", "no": "–"}


def support() -> Mapping[str, Any]:
    """What the file says: `features`, `jobs` and `devices` by name, and the `Rows` of each group of plugins."""
    return tomllib.loads((ROOT / "docs" / "support.toml").read_text(encoding="utf-8"))


def support_table() -> str:
    """All of it as Markdown tables."""
    said = support()
    devices = ["| device | state |", "|---|---|", *(f"| {what} | {state} |" for what, state in said["devices"].items())]
    return "\n\n".join(
        [
            *(_marks(group, said[group]) for group in _PLACES),
            "\n".join(devices),
            *(_table(title, said[group]) for group, title in _TITLES.items()),
        ]
    )


def with_table(document: str) -> str:
    """`document` with the present table between the markers. Raises ValueError where one is missing."""
    head, rest = document[: document.index(BEGIN)], document[document.index(END) :]
    return f"{head}{BEGIN}\n{support_table()}\n{rest}"


def _marks(group: str, rows: Rows) -> str:
    places = _PLACES[group]
    lines = [f"| {group.removesuffix('s')} | {' | '.join(places.values())} | how |", f"|---|{':-:|' * len(places)}---|"]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(_MARKS[row[place]] for place in places)} | {row['note']} |")
    return "\n".join(lines)


def _table(title: str, rows: Rows) -> str:
    lines = [f"| {title} | for | state |", "|---|---|---|"]
    for name, row in rows.items():
        lines.append(f"| `{name}` | {row['what']} | {_STATES[row['state']].format(**row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
