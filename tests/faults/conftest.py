"""Prints the fault table at the end of a session that tried all cases."""

from __future__ import annotations

from typing import Any

from fault_table import IS_FULL, TABLE


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if IS_FULL and TABLE.rows:
        terminalreporter.section("faults")
        terminalreporter.write_line("\n".join(TABLE.lines()))
