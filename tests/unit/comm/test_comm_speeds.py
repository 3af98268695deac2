"""The table of speeds: its definitions, what is read out of it between its rows, and its travel as JSON."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.comm.benchmark import (
    OPERATIONS,
    CollectiveTimings,
    SpeedRow,
    all_cases,
    bus_factor,
    shown,
    sizes,
    speed_table,
)
from polyaccel.errors import CommError

ROWS = st.builds(
    SpeedRow,
    st.sampled_from(OPERATIONS),
    st.integers(1, 1 << 40),
    st.floats(1e-7, 1e3),
    st.floats(1e-7, 1e3),
)
TABLES = st.builds(
    speed_table,
    st.text(max_size=9),
    st.text(max_size=9),
    st.just("float32"),
    st.lists(st.integers(1, 64), min_size=2, max_size=5).map(tuple),
    st.just("2026-11-23 07:00"),
    st.lists(ROWS, min_size=1, max_size=9),
)


def table(*rows: tuple[str, int, float], hosts: tuple[int, ...] = (2, 2)) -> CollectiveTimings:
    made = [SpeedRow(operation, nbytes, seconds, seconds / 2) for operation, nbytes, seconds in rows]
    return speed_table("shm+gloo", "cpu", "float32", hosts, "2026-11-23 07:00", made)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    factors = {name: bus_factor(name, 4) for name in OPERATIONS}
    assert factors == {
        "all_reduce": 1.5,
        "all_gather": 0.75,
        "reduce_scatter": 0.75,
        "all_to_all": 0.75,
        "broadcast": 1.0,
        "send_recv": 1.0,
    }
    made = table(("all_reduce", 8_000_000, 2e-3))
    assert made.bandwidths(made.rows[0]) == pytest.approx((4e9, 6e9))
    assert "8000000      2000.0      1000.0       4.000       6.000" in shown(made)
    assert shown(made).startswith("4 ranks on 2 hosts of 2, 2, cpu, by shm+gloo, float32, ")


@given(TABLES)
def test_a_table_travels_as_json(made: CollectiveTimings) -> None:
    assert CollectiveTimings.from_json(made.to_json(), "here") == made


@given(TABLES, st.integers(1, 1 << 41))
def test_what_is_between_two_rows_lies_between_their_times(made: CollectiveTimings, nbytes: int) -> None:
    operation = made.rows[0].operation
    rows = [row for row in made.rows if row.operation == operation]
    seconds = made.seconds(operation, nbytes)
    below = [row.seconds for row in rows if row.nbytes <= nbytes][-1:]
    above = [row.seconds for row in rows if row.nbytes >= nbytes][:1]
    if below and above:
        assert min(below + above) * 0.999999 <= seconds <= max(below + above) * 1.000001
    elif above:
        assert seconds == rows[0].seconds
    else:
        assert seconds == pytest.approx(rows[-1].seconds * nbytes / rows[-1].nbytes)


def test_another_number_of_ranks_has_the_same_bus_bandwidth() -> None:
    made = table(("all_reduce", 1 << 20, 1e-3), ("broadcast", 1 << 20, 1e-3))
    assert made.seconds("all_reduce", 1 << 20, 8) == pytest.approx(1e-3 * (2 * 7 / 8) / (2 * 3 / 4))
    assert made.seconds("broadcast", 1 << 20, 8) == pytest.approx(1e-3)
    assert made.seconds("all_reduce", 1 << 20, 4) == 1e-3
    with pytest.raises(CommError) as caught:
        made.seconds("all_gather", 1)
    assert caught.value.value == "all_gather"
    assert "all_reduce" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"format": "another"}',
        json.dumps({**json.loads(table(("broadcast", 1, 1.0)).to_json()), "rows": []}),
        json.dumps({**json.loads(table(("broadcast", 1, 1.0)).to_json()), "ranks_on_hosts": [1]}),
        table(("broadcast", 1, 1.0)).to_json().replace("broadcast", "shout"),
        table(("broadcast", 1, 1.0)).to_json().replace('"seconds": 1.0', '"seconds": NaN'),
        table(("broadcast", 1, 1.0)).to_json().replace('"seconds": 1.0', '"seconds": 0'),
    ],
    ids=["empty", "list", "object", "null", "format", "no-rows", "one-rank", "operation", "nan", "zero"],
)
def test_what_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "speeds.json").write_text(text)
    with pytest.raises(CommError) as caught:
        CollectiveTimings.read(tmp_path / "speeds.json")
    assert caught.value.value == str(tmp_path / "speeds.json")
    assert "polyaccel comm bench --json FILE" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommError) as caught:
        CollectiveTimings.read(tmp_path / "absent.json")
    assert caught.value.value == str(tmp_path / "absent.json")


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 26), st.integers(2, 16))
def test_sizes_grow_by_the_factor_up_to_the_largest(smallest: int, more: int, factor: int) -> None:
    found = sizes(smallest, smallest + more, factor)
    assert (found[0], found[-1]) == (smallest, smallest + more)
    assert all(after == before * factor for before, after in pairwise(found[:-1]))
    assert list(found) == sorted(set(found))


def test_an_operation_that_is_none_is_named() -> None:
    assert list(all_cases(["broadcast"], [1, 2])) == [("broadcast", 1), ("broadcast", 2)]
    with pytest.raises(CommError) as caught:
        list(all_cases(["alltoall"], [1]))
    assert caught.value.value == "alltoall"
