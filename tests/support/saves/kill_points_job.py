"""Saves that are killed at steps of the operating system, each in a process of its own: `kill_points_job.py FOLDER MODE
MOST` (see `MODES`; `MOST` 0 is all). Prints the steps of an undisturbed save, and a line of JSON a kill.

It forks, so it has no threads of its own, and takes the processes that its children leave behind for its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from one_value import left_behind, save, value_of

from polyaccel.checkpoint import list_checkpoints
from polyaccel.errors import CheckpointError

MODES = {"foreground": (False, "rank"), "writer": (True, "writer"), "rank": (True, "rank")}
"""Whether a process beside the rank writes, and which process is killed."""
REFUSED = 3
_SUBREAPER = 36


def in_a_child(place: Path, value: float, mode: str, options: dict[str, Any] | None, tag: str = "t") -> int:
    """How a process that saves ends; whatever it leaves behind has ended too."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            save(
                place,
                value,
                tag=tag,
                in_background=MODES[mode][0],
                storage="file" if options is None else "stepped",
                options=options,
            )
            code = 0
        except CheckpointError:
            code = REFUSED
        finally:
            os._exit(code)
    ended = {}
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return ended[child]
        ended[pid] = os.waitstatus_to_exitcode(status)


def check(place: Path, wanted: float, code: int, mode: str) -> None:
    """The tag is the old or the new checkpoint, whole, and the next save clears what was left behind."""
    expected = REFUSED if mode == "writer" else -signal.SIGKILL
    assert code == expected, f"the rank ended with {code}, expected {expected}"
    assert value_of(place, "t") == wanted, f"the tag holds {value_of(place, 't')}, expected {wanted}"
    assert value_of(place, "old") == 0.0
    assert value_of(place) == wanted
    assert all(status.is_good for status in list_checkpoints(place))
    assert in_a_child(place, 3.0, "foreground", None) == 0
    assert value_of(place) == 3.0
    assert not left_behind(place), f"left behind: {left_behind(place)}"


def main() -> None:
    folder, mode, most = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    os.fsync = lambda _: None  # type: ignore[assignment]
    template = folder / "template"
    assert in_a_child(template, 0.0, "foreground", None, "old") == 0
    assert in_a_child(template, 1.0, "foreground", None) == 0

    def tried(name: str, at: int, when: str) -> tuple[Path, list[str], int]:
        place, log = folder / name, folder / f"{name}.log"
        shutil.copytree(template, place)
        log.touch()
        code = in_a_child(place, 2.0, mode, {"log": str(log), "of": MODES[mode][1], "at": at, "when": when})
        return place, log.read_text().splitlines(), code

    place, steps, code = tried("undisturbed", -1, "")
    assert code == 0, f"an undisturbed save ended with {code}"
    assert value_of(place) == 2.0
    print(json.dumps(steps), flush=True)
    commits = steps.index("rename t/commit.json") if "rename t/commit.json" in steps else len(steps)
    cases = [(at, when) for at in range(len(steps)) for when in ("before", "after")]
    chosen = cases if not most else [cases[number * len(cases) // most] for number in range(most)]
    for at, when in chosen:
        place, found, code = tried(f"{at}-{when}", at, when)
        problem = ""
        try:
            assert len(found) == at + 1, f"{len(found)} steps were taken"
            check(place, 2.0 if at > commits or (at == commits and when == "after") else 1.0, code, mode)
        except (AssertionError, CheckpointError) as error:
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps({"step": steps[at], "when": when, "problem": problem}), flush=True)
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
