"""examples/gpt_jax/train.py as its users start it, with torch and without, resumed bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

SCRIPT = str(Path(__file__).parents[2] / "examples" / "gpt_jax" / "train.py")
SMALL = ["--size", "tiny", "--steps", "6", "--precision", "fp32", "--eval-windows", "6", "--eval-every", "3"]
WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; import runpy; sys.argv = sys.argv[1:]; "
    "sys.path.insert(0, sys.argv[0].rpartition('/')[0]); runpy.run_path(sys.argv[0], run_name='__main__')"
)


def start(command: list[str], folder: Path, *arguments: str) -> str:
    """Run the script in `folder`; its output."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder.parent / "cache"),
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [*command, SCRIPT, *SMALL, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "runs" / "gpt" / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines) if "tag" not in record}


@pytest.mark.timeout(300)
def test_two_ranks_learn_and_resume(tmp_path: Path) -> None:
    for name in ("whole", "half"):
        (tmp_path / name).mkdir()
    two = [sys.executable, "-m", "polyaccel", "run", "--nproc", "2"]
    assert "zero-copy 28/28" in start(two, tmp_path / "whole")
    whole = losses(tmp_path / "whole")
    assert whole[6] < whole[1]
    start(two, tmp_path / "half", "--until", "3")
    start(two, tmp_path / "half", "--resume")
    assert losses(tmp_path / "half") == whole
    assert {"sample.txt", "report.html"} <= {file.name for file in (tmp_path / "half" / "runs" / "gpt").iterdir()}


def test_one_rank_trains_without_torch(tmp_path: Path) -> None:
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    start([sys.executable], tmp_path / "with", "--until", "3")
    start([sys.executable, "-c", WITHOUT_TORCH], tmp_path / "without", "--until", "3")
    found, expected = losses(tmp_path / "without"), losses(tmp_path / "with")
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-6)
