"""examples/gpt_jax/train.py as its users start it: with torch, and resumed where torch is truly not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

from bare_environment import BareEnvironment

from polyaccel.comm.backends.shm.backend import ShmBackend

SCRIPT = str(Path(__file__).parents[3] / "examples" / "gpt_jax" / "train.py")
SMALL = ["--size", "tiny", "--steps", "6", "--eval-windows", "6", "--eval-every", "3"]
TWO = ["-m", "polyaccel", "run", "--ranks", "2", SCRIPT, *SMALL]


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Environment of every run: programs are compiled once."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "runs" / "gpt_jax" / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines) if "tag" not in record}


@pytest.mark.skipif(not ShmBackend.probe().usable, reason="without torch ranks meet in shared memory")
@pytest.mark.timeout(500)
def test_two_ranks_learn_and_resume_without_torch(tmp_path: Path, variables: dict[str, str]) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    whole.mkdir()
    half.mkdir()
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, *TWO], cwd=whole, env=inherited | variables, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert "zero-copy 28/28" in done.stdout
    expected = losses(whole)
    assert expected[6] < expected[1]

    without = BareEnvironment(tmp_path / "venv", "jax", "ml_dtypes")
    for arguments in (["--until", "3"], ["--resume"]):
        done = without.run(*TWO, *arguments, folder=half, **variables)
        assert done.returncode == 0, done.stderr
        assert "zero-copy 28/28" in done.stdout
    found = losses(half)
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-6)
    assert {"sample.txt", "report.html"} <= {file.name for file in (half / "runs" / "gpt_jax").iterdir()}
