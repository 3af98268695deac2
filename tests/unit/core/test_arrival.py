"""Ranks' words to their launcher: they arrive whole, and a process without the pipe says nothing to anybody."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

from polyaccel.job.readiness import JOINED, READY_FD_VARIABLE, WAITS, ReadinessPipe, report_to_launcher


@pytest.fixture
def pipe() -> Iterator[ReadinessPipe]:
    pipe = ReadinessPipe()
    yield pipe
    pipe.close()


def test_the_words_of_ranks_arrive_in_order(pipe: ReadinessPipe) -> None:
    environ = {READY_FD_VARIABLE: pipe.name}
    for rank, word in ((0, WAITS), (11, WAITS), (0, JOINED)):
        report_to_launcher(environ, rank, word)
    assert pipe.poll() == [(0, WAITS), (11, WAITS), (0, JOINED)]
    assert pipe.poll() == []


def test_what_is_no_word_of_a_rank_is_passed_over(pipe: ReadinessPipe) -> None:
    os.write(pipe.write_fd, b"hello\n\xff waits\n1 waits\n")
    assert pipe.poll() == [(1, WAITS)]


@pytest.mark.parametrize("value", ["", "nonsense", "99999:1", ":", "1:2:3"])
def test_without_a_pipe_nothing_is_said(value: str) -> None:
    report_to_launcher({READY_FD_VARIABLE: value}, 0, WAITS)


def test_another_file_of_the_same_number_is_left_alone(pipe: ReadinessPipe) -> None:
    with tempfile.TemporaryFile() as other:
        identity = pipe.name.partition(":")[2]
        report_to_launcher({READY_FD_VARIABLE: f"{other.fileno()}:{identity}"}, 0, WAITS)
        assert other.seek(0, os.SEEK_END) == 0
    assert pipe.poll() == []
