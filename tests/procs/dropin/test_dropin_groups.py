"""DeepSpeed's groups of ranks on two processes, and tokens that tensor ranks gather and drop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "support" / "jobs" / "dropin_groups.py"


def answers(axis: str) -> list[dict[str, Any]]:
    code = "from polyaccel_deepspeed.commands import launch; raise SystemExit(launch())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--num_gpus", "2", str(SCRIPT), "--axis", axis],
        env={**os.environ, "PYTHONPATH": str(ROOT / "plugins" / "polyaccel-deepspeed")},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '"gathered"' in line]
    return sorted(map(json.loads, lines), key=lambda one: int(one["rank"]))


@pytest.mark.parametrize("axis", ["tensor", "sequence"])
def test_groups_and_tokens_of_two_ranks(axis: str) -> None:
    for rank, found in enumerate(answers(axis)):
        assert found["logged"]
        if axis == "tensor":
            assert found["gathered"] == [0, 0, 1, 1]
            assert found["gradient"] == [[0, 1], [2, 3]][rank]
            assert found["dropped"] == [[0, 1], [2, 3]][rank]
            assert found["gradient of whole"] == [1, 1, 2, 2]
            assert (found["data"], found["tokens"], found["sequence"]) == (1, 1, 1)
            assert found["sizes"] == [1, 1, rank]
            assert found["data of groups"] == 1
        else:
            assert found["gathered"] == [rank, rank]
            assert found["dropped"] == [0, 1, 2, 3]
            assert (found["data"], found["tokens"], found["sequence"]) == (1, 2, 2)
            assert found["sizes"] == [2, 2, 0]
            assert found["data of groups"] == 2
