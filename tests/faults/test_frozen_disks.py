"""Disks that answer no write: the training goes on, the save fails, and the next one is whole once the disk answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_table import TABLE, Ends

JOB = Path(__file__).parents[1] / "support" / "saves" / "frozen_disk_job.py"
LOGGED = Ends("continues, and logs or raises that the save has failed", "the old checkpoint; the next save is whole")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that can be frozen: a file of 32 MiB, mounted. A frozen one cannot be left, so it always thaws."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True, timeout=60)
        subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    try:
        yield folder
    finally:
        thaw(folder)
        subprocess.run(["umount", "--lazy", str(folder)], check=False, timeout=60)


def thaw(disk: Path) -> None:
    """Let a disk answer again; one that answers stays as it is."""
    subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=False, capture_output=True, timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="fsfreeze is Linux's")
@pytest.mark.parametrize(
    ("moment", "on_failure", "raised"), [("before the save", "log", 0), ("during", "log", 0), ("during", "raise", 1)]
)
def test_training_goes_on_while_a_disk_is_frozen(moment: str, on_failure: str, raised: int, disk: Path) -> None:
    with TABLE.case(f"a disk that freezes {moment}, {on_failure}", LOGGED):
        job = subprocess.Popen(
            [sys.executable, str(JOB), str(disk), moment, on_failure],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            printed, errors = job.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            thaw(disk)  # first: a process that waits for a frozen disk cannot be killed
            job.kill()
            raise
        assert job.returncode == 0, errors[-4000:]
        seen = json.loads(printed.splitlines()[-1])
        assert seen == {"raised": raised, "good": ["kept", "one"]}
        assert ("training continues without a checkpoint" in errors) == (on_failure == "log")
