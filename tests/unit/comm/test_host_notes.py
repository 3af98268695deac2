"""Ranks of one host tell each other where they are without torch; whoever does not belong to them is turned away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count
from threading import Event
from typing import Any

import pytest
from backend_marks import needs

from polyaccel.comm.rendezvous import unix_rendezvous
from polyaccel.comm.rendezvous.unix_rendezvous import all_gather_on_host
from polyaccel.core import deadline
from polyaccel.core.deadline import Deadline
from polyaccel.errors import CommError, CommTimeout

pytestmark = needs("shm")
_places = count()


@pytest.fixture
def place() -> str:
    return f"{os.getpid()}:{next(_places)}"


class Clock:
    """Time that goes on when the test says so: a rank that is late on a busy machine is not late here."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deadline, "monotonic", clock)
    return clock


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def enter(threads: ThreadPoolExecutor, place: str, rank: int, world: int, limit_s: float = 100.0) -> Future[list[str]]:
    return threads.submit(all_gather_on_host, place, rank, world, f"note {rank}", Deadline(limit_s))


def test_every_rank_gets_every_note_again_and_again(threads: ThreadPoolExecutor, place: str) -> None:
    for world in (1, 2, 5, 5):
        # The last ranks come first, and look for rank 0 before it is there.
        found = [enter(threads, place, rank, world) for rank in reversed(range(world))]
        assert [one.result() for one in found] == [[f"note {rank}" for rank in range(world)]] * world


def test_who_does_not_come_is_named_by_everybody(
    threads: ThreadPoolExecutor, place: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_there, take = Event(), unix_rendezvous._take

    def noted(*arguments: Any) -> str:
        problem = take(*arguments)
        is_there.set()
        return problem

    monkeypatch.setattr(unix_rendezvous, "_take", noted)
    found = [enter(threads, place, rank, 4, limit_s=0.5) for rank in (0, 2)]
    assert is_there.wait(30)
    clock.now_s = 1.0
    for one in found:
        with pytest.raises(CommTimeout) as caught:
            one.result()
        assert all(part in str(caught.value) for part in ("0.5", "ranks [1, 3]"))
        assert caught.value.missing_ranks == (1, 3)


def test_rank_0_that_does_not_come_is_named(place: str) -> None:
    with pytest.raises(CommTimeout) as caught:
        all_gather_on_host(place, 1, 2, "note", Deadline(0.05))
    assert "ranks [0]" in str(caught.value)
    assert caught.value.missing_ranks == (0,)


def test_two_jobs_at_one_place_are_told(threads: ThreadPoolExecutor, place: str) -> None:
    first = enter(threads, place, 0, 3)
    one = enter(threads, place, 1, 3)
    with pytest.raises(CommError) as caught:
        all_gather_on_host(place, 1, 2, "stray", Deadline(30.0))
    assert caught.value.value == place
    assert all(part in str(caught.value) for part in ("rank 1", "rank 0"))
    with pytest.raises(CommError) as caught:
        all_gather_on_host(place, 0, 3, "stray", Deadline(30.0))
    assert caught.value.value == place
    again = enter(threads, place, 1, 3)  # this or the first rank 1 is one too many, and learns it while they still meet
    wait([one, again], return_when=FIRST_COMPLETED)
    last = enter(threads, place, 2, 3)
    assert first.result() == last.result() == ["note 0", "note 1", "note 2"]
    problems = [error for error in (one.exception(), again.exception()) if error is not None]
    assert [str(error).splitlines()[0] for error in problems] == [
        f"two jobs use the rendezvous {place}: there are two ranks 1"
    ]


def test_processes_of_another_user_are_neither_heard_nor_told(
    threads: ThreadPoolExecutor, place: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_rendezvous, "_user_of", lambda peer: os.geteuid() + 1)
    listening = enter(threads, place, 0, 2, limit_s=0.5)
    with pytest.raises(CommError) as caught:
        all_gather_on_host(place, 1, 2, "note", Deadline(30.0))
    assert caught.value.value == 1
    assert str(os.geteuid() + 1) in str(caught.value)
    clock.now_s = 1.0
    with pytest.raises(CommTimeout) as caught:
        listening.result()
    assert caught.value.value == (1,)
    assert "ranks [1]" in str(caught.value)
