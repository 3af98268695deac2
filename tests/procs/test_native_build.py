"""The package is built on a machine without a compiler, and on one without CMake: then it is pure Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
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
        timeout=100,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = ZipFile(wheel).namelist()
    assert "polyaccel/ops/native.py" in names
    assert not any("libpolyaccel_cpu" in name for name in names)
