"""Mosaic's streams, stopped in the middle of an epoch and resumed on as many ranks and on one (`make test-mosaic`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

mosaic = pytest.importorskip("streaming", reason="make test-mosaic has it")

pytestmark = pytest.mark.filterwarnings("ignore")  # those of other packages

JOB = Path(__file__).parents[2] / "support" / "jobs" / "mosaic_job.py"
COUNT = 60


def run(ranks: int, folder: Path, saved: Path, first: int, last: int) -> list[list[list[int]]]:
    """Return the samples of each step of each rank."""
    arguments = [str(folder), str(saved), str(first), str(last)]
    command = [sys.executable, "-m", "polyaccel", "run", "--ranks", str(ranks), str(JOB), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    found = [json.loads(line.partition("seen ")[2]) for line in done.stdout.splitlines() if "seen " in line]
    return [seen for _, seen in sorted(found)]


def test_a_stream_continues_exactly_on_as_many_ranks_and_on_one(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    with mosaic.MDSWriter(out=str(folder), columns={"number": "int"}, size_limit=400) as writer:
        for number in range(COUNT):
            writer.write({"number": number})
    wanted = run(2, folder, tmp_path / "whole", 0, 7)
    assert len({number for rank in wanted for step in rank for number in step}) == 7 * 8
    assert run(2, folder, tmp_path / "part", 0, 3) == [rank[:3] for rank in wanted]
    assert run(2, folder, tmp_path / "part", 3, 7) == [rank[3:] for rank in wanted]
    alone = run(1, folder, tmp_path / "part", 3, 7)
    assert [sorted(step) for step in alone[0]] == [sorted(one + two) for one, two in zip(*wanted, strict=True)][3:]
