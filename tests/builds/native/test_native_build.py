"""The package is built on a machine without a compiler, and on one without CMake: then it is pure Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[3]
BUILD = "import sys; from scikit_build_core.build import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.mark.parametrize("missing", ["compiler", "cmake"])
def test_what_is_missing_is_done_without(missing: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {**os.environ, "CXX": "/nonexistent/c++"}
    if missing == "cmake":
        environment = {**os.environ, "PATH": str(empty)}
    subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=280,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = ZipFile(wheel).namelist()
    assert "polyaccel/ops/native.py" in names
    assert not any("libpolyaccel_cpu" in name for name in names)
    page = {
        f"polyaccel/observability/dashboard/{part}"
        for part in ("page.html", "page.css", "page.js", "cards.js", "charts.js")
    }
    assert page <= set(names)


def test_nothing_is_compiled_at_import_or_in_the_first_step(tmp_path: Path) -> None:
    """Every compiler that could be called leaves a word behind."""
    tools, called = tmp_path / "tools", tmp_path / "called"
    tools.mkdir()
    for name in ("c++", "g++", "cc", "gcc", "clang", "clang++", "nvcc", "cmake", "ninja", "make", "ld", "as"):
        tool = tools / name
        tool.write_text(f"#!/bin/sh\necho {name} >> {called}\nexit 1\n")
        tool.chmod(0o755)
    script = """
import torch, polyaccel
config = {"train_batch_size": 2, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
engine, *_ = polyaccel.initialize(model=torch.nn.Linear(64, 64), config=config)
engine.backward(engine(torch.ones(2, 64, dtype=torch.bfloat16)).float().sum())
engine.step()
assert engine.global_steps == 1
engine.destroy()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "PATH": str(tools), "CXX": str(tools / "c++"), "CC": str(tools / "cc")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not called.exists(), called.read_text()
