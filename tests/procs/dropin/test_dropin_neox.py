"""A training of GPT-NeoX's shape comes to the figures of the real package, over the stages of the drop-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "plugins" / "polyaccel-deepspeed"
SCRIPT = ROOT / "tests" / "support" / "pipelines" / "neox_training.py"

REAL: dict[tuple[int, int], dict[str, Any]] = {}


def results(folder: Path, ranks: int, stages: int, interval: int) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(PLUGIN), "CHECKPOINT_NUM_LAYERS": str(interval)}
    command = [sys.executable, "-m", "polyaccel", "run", "--nproc", str(ranks), str(SCRIPT), str(folder), str(stages)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = [line for line in done.stdout.splitlines() if "RESULT" in line]
    return json.loads(found.partition("RESULT ")[2])


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("ranks", "stages", "interval"), [(2, 2, 0), (2, 1, 1), (3, 3, 1)])
def test_a_training_of_neox_s_shape_is_that_of_the_real_package(tmp_path, ranks, stages, interval):
    found, expected = results(tmp_path, ranks, stages, interval), REAL[ranks, stages]
    for name in ("losses", "norms", "evaluated", "short", "after", "logits", "rate"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert found["tokens"] == expected["tokens"]
    assert set(found["names"]) <= set(expected["names"])
