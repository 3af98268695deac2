"""examples/mixture/train.py as its users start it: two ranks share experts, and the report compares them with a dense
model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[3] / "examples" / "mixture" / "train.py")
LAUNCH = [sys.executable, "-m", "polyaccel", "run", "--nproc", "2", SCRIPT, "--size", "tiny", "--eval-windows", "32"]


def compared(folder: Path, *options: str, timeout_s: int) -> tuple[str, float, float]:
    """What it printed, and the last losses of the mixture and of the dense model."""
    done = subprocess.run([*LAUNCH, *options], cwd=folder, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    found = re.search(r"mixture ([0-9.]+), dense ([0-9.]+), ", done.stdout)
    assert found is not None, done.stdout
    return done.stdout, float(found[1]), float(found[2])


@pytest.mark.timeout(200)
def test_both_train_and_the_report_says_where_tokens_went(tmp_path: Path) -> None:
    said, mixture, _ = compared(tmp_path, "--steps", "6", "--eval-every", "3", timeout_s=150)
    assert len(re.findall(r"(dense|mixture), step \d: validation loss", said)) == 4
    page = (tmp_path / "runs" / "mixture" / "report.html").read_text(encoding="utf-8")
    assert f"mixture, {mixture:.4f} at last" in page
    total, active, dense = (
        int(re.search(f"<td>{row}</td><td>([0-9,]+)</td><td>([0-9,]+)</td>", page)[which].replace(",", ""))  # type: ignore[index]
        for row, which in (("parameters", 2), ("parameters that a token meets", 2), ("parameters", 1))
    )
    assert 0.97 * dense < active <= dense < total
    loads = [
        [int(count) for count in re.findall(r"</div>(\d+)</td>", line)]
        for line in re.findall(r"<tr><td>blocks\.\d\.mixture\.experts</td><td style.*?</tr>", page)
    ]
    assert [len(counts) for counts in loads] == [8, 8]
    assert {sum(counts) for counts in loads} == {2 * 2 * 8 * 64}  # choices of the windows of two ranks
    assert "report: runs/mixture/report.html" in said


@pytest.mark.timeout(290)
def test_the_mixture_learns_more_of_the_same_bytes(tmp_path: Path) -> None:
    _, mixture, dense = compared(tmp_path, "--steps", "400", "--eval-every", "400", timeout_s=280)
    assert mixture < dense - 0.01
