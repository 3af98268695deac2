"""examples/pipeline/train.py as its users start it: two stages learn, and are drawn over time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[3] / "examples" / "pipeline" / "train.py")
SHORT = ["--length", "32", "--layers", "4", "--steps", "4", "--schedule", "zb-h1"]


@pytest.mark.timeout(200)
def test_two_stages_learn_and_are_drawn(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", SCRIPT, *SHORT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss ([0-9.]+), ", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    page = (tmp_path / "runs" / "pipeline" / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "zb-h1, measured, ms: 2 stages, 8 micro-batches, makespan" in page
    assert page.count("backward, weight") == 2
    assert "report: runs/pipeline/report.html" in done.stdout
