"""The fault table: rows of a session take the place of those of the same faults on the page."""

from __future__ import annotations

import pytest
from fault_table import Ends, FaultTable

PAGE = """# Faults

| fault | ends | exit code | the message | state | left behind | found | on |
| --- | --- | --- | --- | --- | --- | --- | --- |
| one | at once | 1 | old | old | nothing | 1 of 1 | 2026-01-01 |
| two | at once | 1 | m | s | nothing | 3 of 3 | 2026-01-01 |
"""


def test_rows_are_renewed_by_fault_and_new_ones_come_last() -> None:
    table = FaultTable()
    for _ in range(2):
        with table.case("one", Ends("says it", "as before")):
            pass
    with table.case("three", Ends("m", "s", code="0")):
        pass
    assert table.renewed(PAGE, "2026-02-02").splitlines()[4:] == [
        "| one | at once | 1 | says it | as before | nothing | 2 of 2 | 2026-02-02 |",
        "| two | at once | 1 | m | s | nothing | 3 of 3 | 2026-01-01 |",
        "| three | at once | 0 | m | s | nothing | 1 of 1 | 2026-02-02 |",
    ]


def test_a_case_that_fails_is_tried_and_not_held() -> None:
    table = FaultTable()
    with pytest.raises(ValueError) as caught, table.case("one", Ends("m", "s")):
        raise ValueError("broken")
    assert str(caught.value) == "broken"
    assert (table.rows["one"].tried, table.rows["one"].held) == (1, 0)
