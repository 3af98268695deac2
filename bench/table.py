"""Tables that read well in a terminal and are Markdown, so that `RESULTS.md` takes them as they are."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from bench.steps.cases import Case
from bench.steps.summary import MemoryRow, Row

_MIB = 1 << 20
_NONE = "-"


def make_console() -> Console:
    """A console that never wraps a table: in a file there is no width, and a wrapped row is no Markdown."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, width=200)


def make_table(title: str, columns: Sequence[str]) -> Table:
    """An empty table; the first column is text, the others are figures."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.MARKDOWN)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def step_table(case: Case, rows: Sequence[Row]) -> Table:
    columns = (
        "variant",
        "step s",
        "min s",
        "CPU s",
        "tokens/s",
        "tax",
        "peak MiB",
        "PSS MiB",
        "faults",
        "loss off by",
        "note",
    )
    table = make_table(str(case), columns)
    for row in rows:
        table.add_row(
            row.variant,
            f"{row.step_s:.4f}",
            f"{row.fastest_s:.4f}",
            f"{row.cpu_s:.4f}",
            f"{row.tokens_per_s:.0f}",
            _NONE if row.tax is None else f"{100 * row.tax:+.0f} %",
            f"{row.peak_nbytes / _MIB:.0f}",
            f"{row.pss_nbytes / _MIB:.0f}",
            f"{row.minor_faults:.0f}",
            _NONE if row.deviation is None else f"{row.deviation:.1e}",
            ", ".join(_notes(row)),
        )
    return table


def _notes(row: Row) -> list[str]:
    notes = ["WRONG"] if row.is_wrong else []
    return [*notes, f"others used {row.other_cpus:.1f} CPUs"] if row.was_disturbed else notes


def memory_table(case: Case, rows: Sequence[MemoryRow]) -> Table:
    table = make_table(
        f"Peak memory a rank in MiB: {case}",
        ("variant", "base", "states by formula", "rest", "expected", "measured", "difference", "PSS"),
    )
    for row in rows:
        known = row.expected is not None and row.states is not None
        table.add_row(
            row.variant,
            _mib(row.base),
            _mib(row.states),
            _mib(row.rest) if known else _NONE,
            _mib(row.expected),
            _mib(row.peak),
            f"{100 * (row.peak / row.expected - 1):+.1f} %" if row.expected is not None else _NONE,
            _mib(row.pss),
        )
    return table


def _mib(nbytes: float | None) -> str:
    return _NONE if nbytes is None else f"{nbytes / _MIB:.0f}"
