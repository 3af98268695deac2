"""recipes/ray_train.py on a local Ray of two workers: a start that fails goes on from Ray's checkpoint, with the losses
of an undisturbed run. `make test-ray` has the environment."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "ray_train.py"
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make test-ray")


def _finished(folder: Path, *options: str) -> tuple[dict[str, float], Path]:
    """The last metrics of a run, and where Ray keeps its newest checkpoint."""
    command = [sys.executable, str(RECIPE), "--storage", str(folder), "--steps", "6", "--save-every", "2", *options]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("finished: "))
    numbers = re.findall(r"'(\w+)': ([-\d.e]+)", line)
    kept = re.search(r"path=([^)]+)\)", line)
    assert kept is not None, line
    return {name: float(value) for name, value in numbers}, Path(kept[1])


@pytest.mark.timeout(1100)
def test_a_start_that_fails_goes_on_from_rays_checkpoint(tmp_path: Path) -> None:
    undisturbed, _ = _finished(tmp_path / "one")
    assert (undisturbed["step"], undisturbed["ranks"], undisturbed["began_at"]) == (5, 2, 0)
    disturbed, kept = _finished(tmp_path / "other", "--fail-at", "3")
    assert (disturbed["step"], disturbed["ranks"], disturbed["began_at"]) == (5, 2, 2)
    assert disturbed["loss"] == undisturbed["loss"]
    assert kept.is_relative_to(tmp_path / "other")
    assert (kept / "latest").read_text() == "global_step6"
    listed = [sys.executable, "-m", "polyaccel", "ckpt", "verify", str(kept)]
    assert subprocess.run(listed, capture_output=True, timeout=280).returncode == 0
