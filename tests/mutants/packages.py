"""Which files are changed, and which tests must notice."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
THREADS = "tests/threads"
CONTRACT, JOINING = "tests/procs/comm/test_comm_contract_gloo.py", "tests/procs/comm/test_comm_init.py"
PACKAGES = {
    "polyaccel/checkpoint": ("tests/unit/checkpoint", f"{THREADS}/checkpoint"),
    "polyaccel/checkpoint/in_memory": ("tests/unit/checkpoint", f"{THREADS}/in_memory"),
    "polyaccel/checkpoint/save": (
        "tests/unit/checkpoint",
        f"{THREADS}/checkpoint",
        "tests/faults/test_background_saves.py",
    ),
    "polyaccel/comm/backends/shm": ("tests/unit/comm", "tests/procs/shm"),
    "polyaccel/comm/backends/mpi": ("tests/unit/comm", "tests/procs/mpi"),
    "polyaccel/comm/backends/torch": (
        "tests/unit/comm",
        JOINING,
        CONTRACT,
        "tests/procs/torch/test_parity_processes.py",
        "tests/procs/cli/test_doctor.py",
    ),
    "polyaccel/comm/flight_recorder": ("tests/unit/comm", f"{THREADS}/comm", "tests/procs/comm/test_comm_dumps.py"),
    "polyaccel/comm/launchers": ("tests/unit/discovery", "tests/procs/comm/test_discovery_launchers.py"),
    "polyaccel/comm/discovery.py": ("tests/unit/discovery", "tests/procs/comm/test_discovery_launchers.py"),
    "polyaccel/comm": ("tests/unit/comm", "tests/unit/discovery", f"{THREADS}/comm", JOINING, CONTRACT),
    "polyaccel/zero": (
        *("tests/unit/zero", f"{THREADS}/zero", f"{THREADS}/torch/test_parity.py", "tests/unit/planner"),
        *(f"{THREADS}/sharding/test_stage3_parity.py", f"{THREADS}/offload/test_offload_parity.py"),
        "tests/procs/torch/test_parity_processes.py",
    ),
}
"""The tests of each package, the quick ones first. The innermost one counts."""
APART = ("polyaccel/comm/backends/ccl",)
"""Packages whose tests need an environment of their own."""


def tests_of(file: str, tree: Path) -> tuple[str, ...]:
    """The test files of `tree` for the package of the source `file`, those that are called after it first."""
    named = PACKAGES[max((package for package in PACKAGES if is_in(file, package)), key=len)]
    files = [one for name in named for one in sorted((tree / name).rglob("test_*.py")) or [tree / name]]
    ordered = sorted(files, key=lambda one: Path(file).stem not in one.stem)
    return tuple(dict.fromkeys(one.relative_to(tree).as_posix() for one in ordered))


def is_in(file: str, package: str) -> bool:
    return file == package or file.startswith(f"{package}/")


def sources() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "polyaccel"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [
        file
        for file in listed.stdout.splitlines()
        if file.endswith(".py") and any(is_in(file, package) for package in PACKAGES)
        if not any(is_in(file, package) for package in APART)
    ]
