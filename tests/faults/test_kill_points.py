"""A save that is killed before or after any step of the operating system leaves the old checkpoint or the new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fault_table import IS_FULL, TABLE, Ends
from one_value import installed_in

SAVES = Path(__file__).parents[1] / "support" / "saves"
KILLED = Ends("none, or that the writing process has ended", "the old checkpoint, or the new one, whole", code="-")
KINDS = {
    "foreground": "a save that training waits for",
    "writer": "the process that writes a checkpoint",
    "rank": "a rank that begins a save in the background",
}
SAMPLE, FEWEST = {"foreground": 16, "writer": 4, "rank": 2}, {"foreground": 64, "writer": 50, "rank": 14}
"""The kills that `make test` tries, and how many there are at least: before and after each step. The last make 128."""


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no /proc to name a file by its descriptor")
@pytest.mark.parametrize("mode", KINDS)
def test_a_kill_at_any_step_leaves_the_old_or_the_new_checkpoint(mode: str, tmp_path: Path) -> None:
    """The next save of another process is whole too, and nothing is left of the one that was killed."""
    installed_in(tmp_path / "site", "stepped", "stepped_storage:SteppedStorage")
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (tmp_path / "site", SAVES))),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [
            sys.executable,
            str(SAVES / "kill_points_job.py"),
            str(tmp_path),
            mode,
            str(0 if IS_FULL else SAMPLE[mode]),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        env=environ,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps, *lines = map(json.loads, done.stdout.splitlines())
    assert 2 * len(steps) >= FEWEST[mode], steps
    assert {"create", "write", "fsync", "rename"} <= {step.partition(" ")[0] for step in steps}
    assert len(lines) == (2 * len(steps) if IS_FULL else SAMPLE[mode])
    for line in lines:
        verb = line["step"].partition(" ")[0]
        with TABLE.case(f"{KINDS[mode]}: killed before or after a {verb}", KILLED):
            assert not line["problem"], f"{line['when']} {line['step']}: {line['problem']}"
