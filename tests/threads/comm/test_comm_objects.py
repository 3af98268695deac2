"""Objects between ranks: plain values from anybody, pickles only under the seal of the job's secret."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from polyaccel import comm
from polyaccel.comm import secret as comm_secret
from polyaccel.comm.base import Communicator
from polyaccel.comm.objects import MOST_OBJECT_NBYTES
from polyaccel.core import tagged_json
from polyaccel.errors import CommError
from polyaccel.job.auth import SECRET_VARIABLE, sign
from polyaccel.testkit.ranks.threads import run_threads

SECRET = "of this job, and of no other"
RAN: list[int] = []


class Trap:
    """An object whose reader runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RAN.append, (os.getpid(),)


class Point:
    """An object of the user's own."""

    def __init__(self, x: int) -> None:
        self.x = x


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    RAN.clear()


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    return SECRET


@pytest.fixture
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


def gathered(mine: Any) -> list[Any]:
    found: list[Any] = [None] * comm.get_world_size()
    comm.all_gather_object(found, mine)
    return found


def test_the_engines_own_exchange_runs_nothing_that_a_peer_sends() -> None:
    def body(communicator: Communicator) -> str:
        if communicator.rank == 1:  # a stranger in rank 1's place
            communicator.all_gather_bytes(pickle.dumps(Trap()))
            return ""
        with pytest.raises(CommError) as caught:
            communicator.all_gather_object("mine")
        assert "rank 1" in str(caught.value)
        return str(caught.value)

    assert "a stranger may have sent this" in run_threads(2, body)[0]
    assert RAN == []


@pytest.mark.parametrize("value", [Point(1), {1: 2}, {1, 2}, Point])
def test_the_engines_own_exchange_takes_plain_values_only(value: object) -> None:
    def body(communicator: Communicator) -> None:
        with pytest.raises(CommError) as caught:
            communicator.all_gather_object(value)
        assert str(caught.value.value).startswith(("builtins.", "test_comm_objects.")) or isinstance(value, dict)

    run_threads(2, body)


def test_a_peer_that_announces_too_much_is_refused_before_memory_is_asked_for() -> None:
    def body(communicator: Communicator) -> None:
        if communicator.rank == 1:
            communicator._gather_frames((MOST_OBJECT_NBYTES + 1).to_bytes(8, "little"), 2048)
            return
        with pytest.raises(CommError) as caught:
            Communicator.all_gather_bytes(communicator, b"mine")
        assert all(part in str(caught.value) for part in ("rank 1", str(MOST_OBJECT_NBYTES + 1)))

    run_threads(2, body)


@pytest.mark.usefixtures("no_secret")
def test_users_plain_values_travel_without_a_secret() -> None:
    def body(communicator: Communicator) -> Any:
        values: list[Any] = [(communicator.rank, b"x"), None]
        comm.broadcast_object_list(values, src=1)
        return values, gathered({"rank": communicator.rank})

    assert run_threads(2, body) == [([(1, b"x"), None], [{"rank": 0}, {"rank": 1}])] * 2


@pytest.mark.usefixtures("no_secret")
def test_other_objects_are_refused_without_a_secret_and_the_cure_names_it() -> None:
    def body(_: Communicator) -> None:
        with pytest.raises(CommError) as caught:
            gathered(Point(1))
        assert caught.value.value == "test_comm_objects.Point"
        assert SECRET_VARIABLE in str(caught.value)

    run_threads(2, body)


@pytest.mark.usefixtures("secret")
def test_any_object_travels_under_the_secret() -> None:
    def body(communicator: Communicator) -> Any:
        values = [Point(communicator.rank)]
        comm.broadcast_object_list(values, src=1)
        return [values[0].x, *(point.x for point in gathered(Point(communicator.rank)))]

    assert run_threads(2, body) == [[1, 0, 1]] * 2


@pytest.mark.usefixtures("secret")
@pytest.mark.parametrize(
    "forge",
    [
        lambda earlier: b"up" + pickle.dumps(Trap()),
        lambda earlier: b"uv" + tagged_json.to_bytes(1, "value"),
        lambda earlier: b"s" + bytes(32) + b"p" + pickle.dumps(Trap()),
        lambda earlier: b"s" + sign(b"of another job entirely", "object of rank 1 of (0, 1) after #0", b"v1"),
        lambda earlier: earlier,
        lambda earlier: earlier[:-1],
        lambda earlier: b"",
        lambda earlier: b"s",
    ],
    ids=["pickle", "unsealed", "no seal", "another secret", "replayed", "cut", "nothing", "short"],
)
def test_what_a_stranger_sends_is_refused_before_it_is_read(forge: Any) -> None:
    def body(communicator: Communicator) -> None:
        if communicator.rank == 1:
            earlier = communicator.all_gather_bytes(
                b"s" + sign(SECRET.encode(), "object of rank 1 of (0, 1) after #-1", b"v1")
            )[1]
            communicator.all_gather_bytes(forge(earlier))
            return
        assert gathered(0) == [0, 1]
        with pytest.raises(CommError) as caught:
            gathered(0)
        assert caught.value.value == 1
        assert "rank 1" in str(caught.value)

    run_threads(2, body)
    assert RAN == []


@pytest.mark.usefixtures("no_secret")
@pytest.mark.parametrize(
    ("message", "named"),
    [
        (b"up" + pickle.dumps(Trap()), "rank 1"),
        (b"uv[", "rank 1"),
        (b"s" + bytes(40), "rank 1"),
    ],
    ids=["pickle", "no JSON", "sealed"],
)
def test_without_a_secret_nothing_but_plain_values_is_read(message: bytes, named: str) -> None:
    def body(communicator: Communicator) -> None:
        if communicator.rank == 1:
            communicator.all_gather_bytes(message)
            return
        with pytest.raises(CommError) as caught:
            gathered(0)
        assert named in str(caught.value)
        assert caught.value.value == 1

    run_threads(2, body)
    assert RAN == []


def test_a_secret_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(CommError) as caught:
        run_threads(2, lambda _: gathered(1))
    assert caught.value.value == 5
    assert SECRET_VARIABLE in str(caught.value)


@pytest.mark.usefixtures("no_secret")
def test_ranks_of_one_user_agree_on_a_secret_and_leave_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(comm_secret, "_agreed", None)
    monkeypatch.setattr(comm_secret, "runtime_folder", lambda environ: tmp_path / "own")
    run_threads(3, comm_secret.negotiate_job_secret)
    assert run_threads(2, lambda communicator: gathered({communicator.rank})) == [[{0}, {1}]] * 2
    assert list((tmp_path / "own").iterdir()) == []


@pytest.mark.usefixtures("no_secret")
@pytest.mark.parametrize("stranger", ["cannot write", "another user's name"])
def test_without_a_file_that_all_can_read_there_is_no_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stranger: str
) -> None:
    monkeypatch.setattr(comm_secret, "_agreed", b"of an earlier group")
    if stranger == "cannot write":
        (tmp_path / "file").touch()
        monkeypatch.setattr(comm_secret, "runtime_folder", lambda environ: tmp_path / "file" / "own")
    else:
        monkeypatch.setattr(comm_secret, "_leave", lambda: "../elsewhere")
        monkeypatch.setattr(comm_secret, "runtime_folder", lambda environ: tmp_path / "own")
        (tmp_path / "elsewhere").write_bytes(bytes(32))
    run_threads(2, comm_secret.negotiate_job_secret)

    def refused(communicator: Communicator) -> None:
        with pytest.raises(CommError) as caught:
            gathered({communicator.rank})
        assert caught.value.value == "builtins.set"

    run_threads(2, refused)


@pytest.mark.usefixtures("no_secret")
def test_a_rank_alone_needs_no_secret() -> None:
    assert run_threads(1, lambda communicator: gathered({3})) == [[{3}]]
