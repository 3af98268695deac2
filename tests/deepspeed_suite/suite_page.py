"""The counts of DeepSpeed's own tests over the drop-in, for docs/compatibility.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import fill

from suite_list import reason_of

BEGIN, END = "<!-- tests/deepspeed_suite: begin -->", "<!-- tests/deepspeed_suite: end -->"


def folder_of(case: str) -> str:
    """Return the folder that a case is counted in: the first two below `unit`."""
    parts = case.partition("::")[0].split("/")[1:-1]
    return "/".join(parts[:2])


def rows_of(passed: Iterable[str], outcomes: Mapping[str, str]) -> dict[str, list[int]]:
    """Count by folder.

    Args:
        passed: Cases that pass under the real package.
        outcomes: What became of each here.

    Returns:
        By folder: cases that pass under the real package, those of private parts, those of public behaviour, and those
        of them that pass here.
    """
    rows = defaultdict[str, list[int]](lambda: [0, 0, 0, 0])
    for case in passed:
        row = rows[folder_of(case)]
        row[0] += 1
        if outcomes.get(case) != "passed" and reason_of(case):
            row[1] += 1
        else:
            row[2] += 1
            row[3] += outcomes.get(case) == "passed"
    return dict(rows)


def page(rows: Mapping[str, list[int]], facts: str) -> str:
    """Write the part of the page.

    Args:
        rows: Counts by folder.
        facts: A sentence with date and versions.

    Returns:
        Markdown.
    """
    return "\n".join([BEGIN, *_lines(rows, facts), END])


def _lines(rows: Mapping[str, list[int]], facts: str) -> Iterator[str]:
    total = [sum(column) for column in zip(*rows.values(), strict=True)] or [0, 0, 0, 0]
    share = 100 * total[3] / max(total[2], 1)
    yield fill(f"{facts} Of {total[2]} cases of public behaviour {total[3]} pass here, {share:.1f} %.", 120) + "\n"
    yield "| folder | pass under DeepSpeed | private | public | pass here |\n|---|---|---|---|---|"
    for folder, row in sorted(rows.items()):
        yield f"| `{folder}` | {' | '.join(map(str, row))} |"
    yield f"| all | {' | '.join(map(str, total))} |"


def put(file: Path, text: str) -> None:
    """Put the part into the page, in place of the one that is there.

    Args:
        file: The page.
        text: The part, with its marks.
    """
    old = file.read_text(encoding="utf-8")
    before, _, rest = old.partition(BEGIN)
    file.write_text(before + text + rest.partition(END)[2], encoding="utf-8")
