"""What README and CONTRIBUTING tell people to type works. Each command is in the table below, or a test fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
RUN_ELSEWHERE = {
    "torchrun --standalone --nproc-per-node 2 examples/gpt/train.py": "tests/procs/test_example_gpt_runs.py",
    "mpirun -n 2 python examples/gpt/train.py": "tests/procs/test_discovery_launchers.py",
    "srun -n 2 python examples/gpt/train.py": "tests/procs/test_discovery_launchers.py",
    "polyaccel run --nproc 2 examples/cifar10/train.py": "tests/procs/test_example_cifar10_runs.py",
}
"""Commands that another test runs."""
MAKE = {
    "make train": "polyaccel run --nproc 2 examples/gpt/train.py",
    "make test": "python -m pytest",
    "make lint": "ruff check .",
}
"""Targets, which would make an environment, and a command that is part of each. CI runs the latter two in full."""
SETUP = {". .venv/bin/activate", ".venv/bin/pre-commit install"}
"""Commands that only prepare the reader's shell or clone."""


def commands() -> set[str]:
    """Every line of every block of shell in the two documents."""
    documents = (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))
    blocks = [block for document in documents for block in FENCE.findall(document.read_text(encoding="utf-8"))]
    return {line for language, text in blocks for line in text.splitlines() if language == "sh"}


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `command` in `folder`, which looks like a clone, with this environment's programs first on the path."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


def test_every_command_is_run_somewhere() -> None:
    assert commands() == {*RUN, *RUN_ELSEWHERE, *MAKE, *SETUP}
    assert all((ROOT / file).exists() for file in RUN_ELSEWHERE.values())


@pytest.mark.parametrize("command", RUN)
def test_a_command_works_as_written(command: str, tmp_path: Path) -> None:
    done = shell(f"{command} {RUN[command]}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert (tmp_path / "runs" / "gpt" / "report.html").exists() is ("gpt" in command)


@pytest.mark.parametrize("target", [*MAKE, "make bench", "make help", "make clean"])
def test_a_target_is_there_and_does_what_it_is_for(target: str) -> None:
    done = subprocess.run([*target.split(), "-n"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert MAKE.get(target, "") in done.stdout


def test_make_makes_its_environment_when_it_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "-n", "test", f"VENV={tmp_path / 'venv'}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    made = next(number for number, line in enumerate(lines) if "-m venv" in line)
    installed = next(number for number, line in enumerate(lines) if "--constraint requirements-dev.lock" in line)
    tested = next(number for number, line in enumerate(lines) if "-m pytest" in line)
    assert made < installed < tested


def test_the_twenty_lines_run(tmp_path: Path) -> None:
    (example,) = (text for language, text in FENCE.findall((ROOT / "README.md").read_text()) if language == "python")
    assert len(example.splitlines()) <= 20
    (tmp_path / "example.py").write_text(example)
    done = shell("polyaccel run --nproc 2 example.py", tmp_path)
    assert done.returncode == 0, done.stderr
    found = [float(loss) for loss in re.findall(r"rank \d: loss ([0-9.]+)", done.stdout)]
    assert len(found) == 2
    assert max(found) < 0.5


def test_every_file_that_a_document_links_to_exists() -> None:
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "docs" / "design.md"):
        links = re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8"))
        assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []
