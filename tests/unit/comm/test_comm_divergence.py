"""Dumps of ranks are compared: the first call that somebody made otherwise or not at all is found, and only that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.comm.flight_recorder.desync import AgreeingGroup, Divergence, as_text, find_desync, listed
from polyaccel.comm.flight_recorder.dump import Dump, DumpedCall, read_dump, write_dump
from polyaccel.errors import CommError

WORLD = (0, 1, 2)


def call(seq: int, what: str = "barrier", *, group: tuple[int, ...] = WORLD, ended: bool = True) -> DumpedCall:
    return DumpedCall(group, seq, what, " bucket 3" if what != "barrier" else "", 1.0, 2.0 if ended else None)


def dump(rank: int, calls: Sequence[DumpedCall], world_size: int = 3) -> Dump:
    return Dump(rank, world_size, "SIGUSR1", 5.0, "host", 100 + rank, tuple(calls))


def test_a_dump_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = dump(1, [call(0), call(1, "all_reduce sum 4 x float32", ended=False)])
    path = write_dump(written, tmp_path)
    assert path.name == "rank-1.json"
    assert read_dump(path) == written
    write_dump(replace(written, reason="again"), path.parent)
    assert read_dump(path).reason == "again"
    assert [one.name for one in path.parent.iterdir()] == ["rank-1.json"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "null", "9" * 5000, "[" * 100_000, '{"format": 99}', '{"format": 1, "calls": [{}]}'),
        '{"format": 1, "rank": 3, "world_size": 2, "reason": "", "at_s": 0, "host": "", "pid": 1, "calls": []}',
        (
            '{"format": 1, "rank": 0, "world_size": 2, "reason": "", "at_s": 0, "host": "", "pid": 1, "calls": '
            '[{"group": [], "seq": 0, "what": "", "purpose": "", "started_s": 0, "ended_s": null}]}'
        ),
    ],
)
def test_what_is_no_dump_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rank-0.json"
    path.write_text(text)
    with pytest.raises(CommError) as caught:
        read_dump(path)
    assert caught.value.value == str(path)


def test_numbers_far_apart_are_compared_without_counting() -> None:
    far = 10**18
    dumps = [dump(0, [call(0), call(far)]), dump(1, [call(0), call(far)]), dump(2, [call(0), call(far, "other")])]
    (finding,) = find_desync(dumps)
    assert isinstance(finding, Divergence)
    assert finding.seq == far


def test_the_first_call_with_another_size_is_found() -> None:
    own, other = "all_reduce sum 4 x float32", "all_reduce sum 5 x float32"
    dumps = [dump(rank, [call(7), call(8, other if rank == 1 else own, ended=False)]) for rank in WORLD]
    (finding,) = find_desync(dumps)
    assert isinstance(finding, Divergence)
    assert (finding.seq, finding.is_waiting) == (8, WORLD)
    text = as_text([finding], dumps)
    assert "the ranks part at #8:" in text
    assert f"rank 0, 2: {own} bucket 3 (waiting)" in text
    assert f"rank 1: {other} bucket 3 (waiting)" in text


def test_a_rank_that_stayed_behind_is_found_with_its_last_call() -> None:
    dumps = [dump(0, [call(0), call(1, ended=False)]), dump(1, [call(0), call(1, ended=False)]), dump(2, [call(0)])]
    (finding,) = find_desync(dumps)
    assert isinstance(finding, Divergence)
    assert finding.seq == 1
    assert "rank 2: did not call it, its last was #0 barrier" in as_text([finding], dumps)


def test_a_rank_without_a_dump_is_said_to_be_missing() -> None:
    dumps = [dump(0, [call(0, ended=False)]), dump(2, [call(0, ended=False)])]
    (finding,) = find_desync(dumps)
    assert finding == AgreeingGroup(WORLD, 0, 0, (0, 2), (0, 2))
    text = as_text([finding], dumps)
    assert "rank 1: no dump" in text
    assert "same calls from #0 to #0; rank 0, 2 still waits in it" in text


def test_groups_are_compared_by_themselves_and_messages_not_at_all() -> None:
    part = (0, 2)
    message = replace(call(0, "send to 1 4 x float32"), is_message=True)
    dumps = [
        dump(0, [call(0), message, call(0, "broadcast", group=part), call(1)]),
        dump(1, [call(0), call(1)]),
        dump(2, [call(0), call(0, "all_gather", group=part), call(1)]),
    ]
    world, pair = find_desync(dumps)
    assert isinstance(world, AgreeingGroup)
    assert isinstance(pair, Divergence)
    assert (pair.group, pair.seq, set(pair.calls)) == (part, 0, {0, 2})


def test_what_left_a_ring_is_not_missing() -> None:
    dumps = [dump(0, [call(seq) for seq in range(5, 9)], 2), dump(1, [call(seq) for seq in range(7, 9)], 2)]
    (finding,) = find_desync([replace(one, calls=tuple(replace(c, group=(0, 1)) for c in one.calls)) for one in dumps])
    assert finding == AgreeingGroup((0, 1), 7, 8, (0, 1), ())


def test_a_rank_that_never_called_on_the_group_is_found() -> None:
    dumps = [dump(0, [call(0, ended=False)]), dump(1, [call(0, ended=False)]), dump(2, [])]
    (finding,) = find_desync(dumps)
    assert isinstance(finding, Divergence)
    assert finding.calls[2] is None
    assert "rank 2: did not call it, nor any" in as_text([finding], dumps)


@given(st.integers(1, 12), st.integers(0, 11), st.integers(0, 2))
def test_one_changed_call_is_always_the_one_found(count: int, at: int, rank: int) -> None:
    at %= count
    dumps = [
        dump(one, [call(seq, "all_gather" if (seq, one) == (at, rank) else "barrier") for seq in range(count)])
        for one in WORLD
    ]
    (finding,) = find_desync(dumps)
    assert isinstance(finding, Divergence)
    assert finding.seq == at


def test_ranks_are_listed_in_spans() -> None:
    assert listed([3, 0, 1, 2, 6]) == "0-3, 6"
    assert listed([4]) == "4"
