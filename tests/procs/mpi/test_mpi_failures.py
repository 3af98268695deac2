"""A job of mpirun ends soon when one of its ranks does, and says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from backend_marks import needs
from mpi_failing import NEVER_S

from polyaccel.testkit.ranks.mpi import mpi_environ, mpirun

pytestmark = needs("mpi")
JOB = str(Path(__file__).parents[2] / "support" / "jobs" / "mpi_failing.py")


def run(fault: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        mpirun(2, sys.executable, JOB, fault, str(timeout_s)),
        env=mpi_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
    )


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "ValueError: of rank 1"),
        ("interrupt", "KeyboardInterrupt"),
        ("thread", "ValueError: of rank 1's thread"),
        ("kill", ""),
    ],
)
def test_a_rank_that_fails_ends_the_job(fault: str, said: str) -> None:
    done = run(fault, NEVER_S)
    assert done.returncode != 0, done.stdout
    assert said in done.stdout
    assert "went on" not in done.stdout


@pytest.mark.parametrize("fault", ["stop", "unfinished"])
def test_a_rank_that_is_stopped_is_named_and_ends_the_job(fault: str) -> None:
    done = run(fault, 2.0)
    assert done.returncode != 0, done.stdout
    assert "timed out after 2 s: ranks [1] did not take part" in done.stdout
    assert ("rank 0 cannot end" in done.stdout) == (fault == "unfinished")


@pytest.mark.parametrize("fault", ["nothing", "other thread"])
def test_a_normal_end_aborts_nothing(fault: str) -> None:
    done = run(fault, NEVER_S)
    assert done.returncode == 0, done.stdout
    assert "Abort" not in done.stdout
    assert "rank 0 joined" in done.stdout
    assert ("rank 0 went on" in done.stdout) == (fault == "other thread")
