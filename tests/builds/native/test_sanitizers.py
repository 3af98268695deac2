"""The compiled kernels under sanitizers: a small `make sanitize`, which has the communicator's tests too."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CASES = [("address,undefined", ("kernel_tests", "files_tests")), ("thread", ("kernel_tests",))]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.timeout(400)  # half a minute each, on idle cores
@pytest.mark.parametrize(("sanitizers", "programs"), CASES, ids=[kind for kind, _ in CASES])
def test_kernels_are_clean_under_sanitizers(sanitizers: str, programs: tuple[str, ...], tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None or shutil.which("cmake") is None:
        pytest.skip("there is no CMake or no C++ compiler")
    empty, program = tmp_path / "empty.cpp", tmp_path / "empty"
    empty.write_text("int main() { return 0; }\n")
    for attempt in ((compiler, f"-fsanitize={sanitizers}", empty, "-o", program), (program,)):
        tried = run(*attempt)
        if tried.returncode:
            pytest.skip(f"{compiler} has no {sanitizers} that runs here: {tried.stderr.strip()[:200]}")

    build = tmp_path / "build"
    options = (f"-DPA_SANITIZE={sanitizers}", "-DPA_TESTS=ON", f"-DCMAKE_CXX_COMPILER={compiler}")
    for step in (
        ("cmake", "-S", ROOT, "-B", build, *options),
        ("cmake", "--build", build, "-j2", "--target", *programs),
        *((build / name,) for name in programs),
    ):
        done = run(*step)
        assert done.returncode == 0, f"{step}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
