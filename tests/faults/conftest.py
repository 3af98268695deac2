"""Prints the fault table at the end of a session that tried all cases, and renews `docs/faults.md` if all held."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

from fault_table import IS_FULL, TABLE

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    if IS_FULL and TABLE.rows:
        day = f"{date.today()}"
        terminalreporter.section("faults")
        terminalreporter.write_line("\n".join(TABLE.lines(day)))
        if exitstatus == 0:
            PAGE.write_text(TABLE.renewed(PAGE.read_text(encoding="utf-8"), day), encoding="utf-8")
