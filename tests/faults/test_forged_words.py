"""What ranks tell each other, forged: notes on the board, flight records, notes of a start, and users' objects."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fault_table import TABLE, Ends, sample
from forging import COUNT, forged, garbled, random_of

from polyaccel import comm
from polyaccel.comm.backends.local.thread_group import DictBoard
from polyaccel.comm.base import Communicator
from polyaccel.comm.flight_recorder.desync import as_text, find_desync
from polyaccel.comm.flight_recorder.dump import read_dump
from polyaccel.comm.flight_recorder.watchdog import WatchedProcess, describe_missing_ranks, have_ended, read_notes
from polyaccel.comm.rendezvous.unix_rendezvous import _take
from polyaccel.core import tagged_json
from polyaccel.errors import CommError
from polyaccel.job.auth import SECRET_VARIABLE, sign
from polyaccel.testkit.ranks.threads import run_threads

NOTE: dict[str, Any] = {
    "at": 1e9,
    "every_s": 1.0,
    "stale_after_s": 15.0,
    "calls": {"0,1": [4, "barrier", 1e9]},
    "process": vars(WatchedProcess(1, 2, "host", "system")),
    "ended": "",
}
CALL = {"group": [0, 1], "what": "barrier", "purpose": "", "started_s": 1.0, "ended_s": None, "is_message": False}
DUMP: dict[str, Any] = {
    "format": 1,
    "rank": 1,
    "world_size": 2,
    "reason": "SIGUSR1",
    "at_s": 5.0,
    "host": "host",
    "pid": 7,
    "calls": [{**CALL, "seq": seq} for seq in range(3)],
}
SECRET = "a secret that strangers do not have"
RAN: list[int] = []


class Trap:
    """An object whose reader runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RAN.append, (1,)


def test_no_note_on_the_board_is_a_traceback() -> None:
    random = random_of(1)
    with TABLE.case("forged notes on the board", Ends("the contents of a valid note", "a rank that has not reported")):
        for number in range(COUNT):
            board = DictBoard()
            text = json.dumps(forged(NOTE, random))
            board.set(1, text if number % 2 else garbled(text.encode(), random).decode(errors="replace"))
            notes = read_notes(board, 2)
            assert set(notes) <= {1}
            describe_missing_ranks((0, 1), 0, 5, "barrier", notes, (1,), now_s=1e9, started_s=1e9)
            have_ended(notes, (0, 1))


def test_no_flight_record_is_a_traceback(tmp_path: Path) -> None:
    random, file = random_of(2), tmp_path / "rank-1.json"
    with TABLE.case("forged flight records", Ends("names the file", "compared, or refused")):
        for number in range(COUNT // 4):
            data = json.dumps(forged(DUMP, random)).encode()
            file.write_bytes(data if number % 2 else garbled(data, random))
            with suppress(CommError):
                dumps = [read_dump(file)]
                assert as_text(find_desync(dumps), dumps)


def test_no_note_of_a_start_is_a_traceback() -> None:
    random = random_of(3)
    note = {"rank": 1, "world_size": 3, "text": "note"}
    with TABLE.case(
        "forged notes of a start", Ends("names what is wrong", "the note of a rank of this world, or none")
    ):
        for number in range(COUNT):
            data = tagged_json.to_bytes(note, "note") if number % 2 else json.dumps(forged(note, random)).encode()
            notes = {0: "own"}
            problem = _take(notes, garbled(data, random) if number % 3 else data, 3)
            assert bool(problem) == (len(notes) == 1)
            assert set(notes) <= {0, 1, 2}
            assert all(isinstance(text, str) for text in notes.values())


def forged_messages() -> list[bytes]:
    """What a stranger could send in the place of rank 1's object."""
    random = random_of(4)
    right = b"s" + sign(b"another secret of a stranger", "object of rank 1 of (0, 1) after #-1", b"v1")
    trap = pickle.dumps(Trap())
    made = [b"", b"u", b"s", b"p" + trap, b"up" + trap, b"uv1", b"s" + bytes(32) + b"p" + trap, trap, right]
    return made + [garbled(random.choice((right, made[4], made[6])), random) for _ in range(191)]


@pytest.mark.parametrize("message", sample(forged_messages(), 10))
@pytest.mark.parametrize("secret", [SECRET, None])
def test_no_object_of_a_stranger_is_read(secret: str | None, message: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    RAN.clear()
    if secret is None:
        monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(SECRET_VARIABLE, secret)

    said: list[str] = []

    def body(communicator: Communicator) -> list[Any]:
        if communicator.rank == 1:
            communicator.all_gather_bytes(message)
            return []
        found: list[Any] = [None, None]
        try:
            comm.all_gather_object(found, "mine")
        except CommError as error:
            said.append(error.message)
        return found

    with TABLE.case(
        "an object of an unknown sender", Ends("names the rank in whose place it came", "nothing of it runs")
    ):
        found = run_threads(2, body)[0]
        assert RAN == []
        if said:
            assert "the object of rank 1" in said[0]
        else:  # without a secret anybody can say a plain value, and nothing else
            assert secret is None
            assert message.startswith(b"uv")
            assert found[0] == "mine"
