"""Prints the table of broken variants at the end of a session that tried all of them by name."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    from test_broken_variants import CAUGHT, IS_FULL
    from variant_table import HEAD

    if IS_FULL and CAUGHT:
        terminalreporter.section("broken variants")
        terminalreporter.write_line("\n".join([*HEAD, *CAUGHT]))
