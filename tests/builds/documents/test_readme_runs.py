"""What README and CONTRIBUTING tell people to type works as written, and so do README's twenty lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TINY = "--size tiny --steps 2 --eval-windows 4"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

RUN = {
    "polyaccel doctor": "",
    "polyaccel plugins": "",
    "polyaccel config check examples/cifar10/config.json": "",
    "polyaccel config schema": "",
    "polyaccel plan examples/cifar10/config.json 1.3B -n 8 --limit-device 16G": "",
    "python examples/gpt/train.py": TINY,
    "polyaccel run --nproc 2 examples/gpt/train.py": TINY,
}
"""Commands that are run here, with what is added to make them short."""


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `command` in `folder`, which looks like a clone, with this environment's programs first on the path."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("command", RUN)
def test_a_command_works_as_written(command: str, tmp_path: Path) -> None:
    done = shell(f"{command} {RUN[command]}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert (tmp_path / "runs" / "gpt" / "report.html").exists() is ("gpt" in command)


def test_the_twenty_lines_run(tmp_path: Path) -> None:
    (example,) = (text for language, text in FENCE.findall((ROOT / "README.md").read_text()) if language == "python")
    assert len(example.splitlines()) <= 20
    (tmp_path / "example.py").write_text(example)
    done = shell("polyaccel run --nproc 2 example.py", tmp_path)
    assert done.returncode == 0, done.stderr
    found = [float(loss) for loss in re.findall(r"rank \d: loss ([0-9.]+)", done.stdout)]
    assert len(found) == 2
    assert max(found) < 0.5
