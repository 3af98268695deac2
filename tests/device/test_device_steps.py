"""`make device` runs a step, writes its outcome, and leaves out what has passed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_a_step_that_passed_is_left_out(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE), "--device", "cpu", "--out", str(tmp_path), "--only", "doctor"]
    for _ in range(2):
        subprocess.run(command, check=True, timeout=250, capture_output=True)
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert [line.split()[:2] for line in lines] == [["doctor", "passed"]]
    assert '"polyaccel.accelerators"' in (tmp_path / "log.txt").read_text()
