"""Rank 0 runs a block before the others do."""

from __future__ import annotations

import threading

import pytest

from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.utils import main_process_first


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_rank_0_is_first_and_an_error_there_keeps_nobody(fails: bool, local: bool) -> None:
    order: list[int] = []
    lock = threading.Lock()

    def body(communicator: Communicator) -> None:
        with main_process_first(local=local):
            with lock:
                order.append(communicator.rank)
            if fails and communicator.rank == 0:
                raise ValueError

    def attempt(communicator: Communicator) -> bool:
        try:
            body(communicator)
        except ValueError:
            return True
        return False

    assert run_threads(3, attempt) == [fails, False, False]
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]


def test_one_process_alone_runs_it_at_once() -> None:
    with main_process_first():
        pass
