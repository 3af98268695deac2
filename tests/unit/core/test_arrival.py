"""Ranks' words to their launcher: they arrive whole, and a process without the pipe says nothing to anybody."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

from polyaccel.arrival import ARRIVAL_VARIABLE, HAS_MET, WAITS, ArrivalPipe, tell_launcher


@pytest.fixture
def pipe() -> Iterator[ArrivalPipe]:
    pipe = ArrivalPipe()
    yield pipe
    pipe.close()


def test_the_words_of_ranks_arrive_in_order(pipe: ArrivalPipe) -> None:
    environ = {ARRIVAL_VARIABLE: pipe.name}
    for rank, word in ((0, WAITS), (11, WAITS), (0, HAS_MET)):
        tell_launcher(environ, rank, word)
    assert pipe.words() == [(0, WAITS), (11, WAITS), (0, HAS_MET)]
    assert pipe.words() == []


def test_what_is_no_word_of_a_rank_is_passed_over(pipe: ArrivalPipe) -> None:
    os.write(pipe.write_fd, b"hello\n\xff waits\n1 waits\n")
    assert pipe.words() == [(1, WAITS)]


@pytest.mark.parametrize("value", ["", "nonsense", "99999:1", ":", "1:2:3"])
def test_without_a_pipe_nothing_is_said(value: str) -> None:
    tell_launcher({ARRIVAL_VARIABLE: value}, 0, WAITS)


def test_another_file_of_the_same_number_is_left_alone(pipe: ArrivalPipe) -> None:
    with tempfile.TemporaryFile() as other:
        identity = pipe.name.partition(":")[2]
        tell_launcher({ARRIVAL_VARIABLE: f"{other.fileno()}:{identity}"}, 0, WAITS)
        assert other.seek(0, os.SEEK_END) == 0
    assert pipe.words() == []
