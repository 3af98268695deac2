"""The figures of docs/benchmarks.md stand in bench/RESULTS.md."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CELL = re.compile(r"\d[\d,]*\.?\d*")


def test_every_figure_is_one_of_the_results() -> None:
    results = set(CELL.findall((ROOT / "bench" / "RESULTS.md").read_text(encoding="utf-8")))
    # A result of four decimals is shown with three.
    shown = results | {f"{float(each):.3f}" for each in results if re.fullmatch(r"0\.\d{4}", each)}
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2:] for line in page.splitlines() if line.startswith("|")]
    figures = [figure for cells in rows for cell in cells for figure in CELL.findall(cell)]
    assert len(figures) > 40
    assert set(figures) <= shown
