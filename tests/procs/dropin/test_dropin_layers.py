"""DeepSpeed's linear layers over tensor ranks, and its means of several tensors, on two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "support" / "jobs" / "dropin_layers.py"


@pytest.mark.parametrize("stage", [0, 2])
def test_layers_over_two_ranks_train_as_the_whole_model(stage: int) -> None:
    code = "from polyaccel_deepspeed.commands import launch; raise SystemExit(launch())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--num_gpus", "2", str(SCRIPT), "--stage", str(stage)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "plugins" / "polyaccel-deepspeed")},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '"found"' in line]
    ranks = sorted(map(json.loads, lines), key=lambda one: int(one["rank"]))
    assert len(ranks) == 2
    for rank, one in enumerate(ranks):
        assert one["found"] == pytest.approx(one["plain"], rel=1e-5)
        assert one["found"][-1] < one["found"][0]
        assert one["shapes"]["up.weight"] == [4 - rank, 6]
        assert one["shapes"]["down.weight"] == [5, 4 - rank]
        assert one["shapes"]["wide.weight"] == [2 - rank, 5]
        assert one["means"] == one["exact"] == [[[0, 0.5, 1], [3, 3.5]], [[1.5, 2, 2.5], [4]]][rank]
