"""A rank of three that ends while the others train: they end too, at once, and say which rank, and how it has ended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import ending_ranks
import pytest
from ending_ranks import LAST, LIMIT_S, WAYS, WORLD
from fault_table import IS_FULL, TABLE, Ends

WHO = r"rank WHO \(process \d+ on \S+\)"
CALL = r"after #\d+ [^:]+"
MEMORY = r"; give it less: a smaller micro-batch, offload, activation checkpointing"
UNCAUGHT = rf"{WHO} takes part no more, {CALL}: uncaught"
IN_ORDER = rf"{WHO} has ended in order, {CALL}: out of data, or sys\.exit\?.*drop_last"
# What it called in its last second it may not have told.
SILENT = rf"{WHO} has ended without a word, ({CALL}|before it noted a call .*): killed, out of memory, or os\._exit\?"
# The store in which ranks tell of themselves lives in rank 0 where no launcher keeps one, and ends with it.
STORE_LOST = rf"{WHO} has ended, and the store in which ranks note how they end cannot be reached"


class Ending(NamedTuple):
    """How a rank ends, and what the others say of it, which is rank WHO."""

    code: int
    message: str


ENDINGS = {
    "memory of a device in forward": Ending(1, rf"{UNCAUGHT} OutOfMemoryError: CUDA out of memory\. .*{MEMORY}"),
    "memory of the host in forward": Ending(1, rf"{UNCAUGHT} RuntimeError: .*{MEMORY}"),
    "memory in backward": Ending(1, rf"{UNCAUGHT} MemoryError: 40 GiB{MEMORY}"),
    "an exception in forward": Ending(1, rf"{UNCAUGHT} ValueError: no such token(;|$)"),
    "an exception in backward": Ending(1, rf"{UNCAUGHT} KeyError: 'missing'"),
    "an exception that the script ignores": Ending(1, rf"{UNCAUGHT} \w+: .*a backward pass failed"),
    "Ctrl-C": Ending(-2, rf"{UNCAUGHT} KeyboardInterrupt"),
    "sys.exit(0)": Ending(0, IN_ORDER),
    "sys.exit(3)": Ending(3, IN_ORDER),
    "os._exit(0)": Ending(0, SILENT),
    "os._exit(9)": Ending(9, SILENT),
    "SIGKILL": Ending(-9, SILENT),
    "abort": Ending(-6, SILENT),
    "out of data": Ending(0, IN_ORDER),
    "one more collective": Ending(1, r"ranks disagree about a collective: rank 0 called .*, rank 2 called "),
    "one collective less": Ending(1, r"ranks disagree about a collective: rank 0 called .*, rank 2 called "),
}
FIRST = ("an exception in forward", "sys.exit(0)", "os._exit(9)", "SIGKILL")
CASES = [(backend, stage, way, LAST) for way in WAYS for backend in ("shm", "gloo") for stage in (0, 2, 3)] + [
    (backend, stage, way, 0) for way in FIRST for backend in ("shm", "gloo") for stage in (0, 2, 3)
]
QUICK = [
    ("gloo", 3, "memory of a device in forward", LAST),
    ("shm", 2, "sys.exit(3)", LAST),
    ("gloo", 2, "os._exit(0)", LAST),
    ("gloo", 2, "SIGKILL", 0),
]


@cache
def outcomes(folder: Path) -> dict[tuple[str, int, str, int], dict[str, Any]]:
    """What came of every case: one process starts them all."""
    cases = CASES if IS_FULL else QUICK
    support = [str(Path(ending_ranks.__file__).parent.parent / each) for each in ("", "jobs", "models")]
    environ = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "POLYACCEL_COMM")
    }
    done = subprocess.run(
        [sys.executable, ending_ranks.__file__, json.dumps(cases), str(folder)],
        env=environ | {"PYTHONPATH": os.pathsep.join(support), "TMPDIR": str(folder),
                       "XDG_RUNTIME_DIR": str(folder), "POLYACCEL_LOG": "error"},
        stdout=subprocess.PIPE, text=True, timeout=LIMIT_S * len(cases), check=True,
    )  # fmt: skip
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ending")


def test_every_way_has_its_ending() -> None:
    assert ENDINGS.keys() == WAYS.keys()


@pytest.mark.timeout(3600 if IS_FULL else 300)
@pytest.mark.parametrize(("backend", "stage", "way", "who"), CASES if IS_FULL else QUICK)
def test_the_others_end_too_and_say_how_it_ended(folder: Path, backend: str, stage: int, way: str, who: int) -> None:
    found, ending = outcomes(folder)[backend, stage, way, who], ENDINGS[way]
    ends = Ends(
        "names the rank, its process and last call, and how it ended", "as of the last save", left="flight records"
    )
    with TABLE.case(f"a rank that ends: {way}", ends):
        assert found["codes"] == [ending.code if rank == who else 1 for rank in range(WORLD)], found["said"]
        for said in (said for rank, said in enumerate(found["said"]) if rank != who):
            message = f"({STORE_LOST}|{ending.message})" if who == 0 and backend == "gloo" else ending.message
            assert re.search(message.replace("WHO", str(who)), said, re.MULTILINE), said
            assert "Timeout" not in said
