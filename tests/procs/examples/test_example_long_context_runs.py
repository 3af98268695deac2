"""examples/long_context/train.py as its users start it: two ranks share each sequence, and learn what one would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[3] / "examples" / "long_context" / "train.py")
SHORT = ["--length", "511", "--steps", "4"]


def losses(launcher: list[str], *options: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, *launcher, SCRIPT, *SHORT, *options], capture_output=True, text=True, timeout=140
    )
    assert done.returncode == 0, done.stderr
    return [float(found) for found in re.findall(r"loss ([0-9.]+), 511 tokens", done.stdout)]


@pytest.mark.timeout(400)
def test_two_ranks_learn_what_one_learns() -> None:
    alone, exchanged = losses([]), losses(["-m", "polyaccel", "run", "--nproc", "2"], "--method", "ulysses")
    assert len(alone) == 4
    assert alone[-1] < alone[0]
    assert exchanged == pytest.approx(alone, abs=2e-5)
