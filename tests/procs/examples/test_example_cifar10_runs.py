"""examples/cifar10/train.py learns: the digits on two ranks, in fp16 alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[3] / "examples" / "cifar10" / "train.py")


@pytest.mark.parametrize(
    ("launcher", "options"),
    [(["-m", "polyaccel", "run", "--nproc", "2"], []), ([], ["--fp16"])],
    ids=["two ranks", "fp16 alone"],
)
def test_it_learns_the_digits(launcher: list[str], options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *launcher, SCRIPT, "--epochs", "2", *options],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    accuracies = [float(found) for found in re.findall(r"test accuracy ([0-9.]+)%", done.stdout)]
    assert len(accuracies) == 2
    assert accuracies[-1] > 70
