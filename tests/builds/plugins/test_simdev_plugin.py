"""The simulated accelerator as its users get it: compiled and installed by pip, found by name, held to its contracts.

Each fault that it can be told to have turns the contract's right test red.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "plugins" / "polyaccel-simdev"
FAULTS = {
    "slow_copy": "test_pinned_copies_are_part_of_their_stream",
    "late_stream": "test_streams_wait_for_events",
    "failing_allocation": "test_memory_is_counted",
    "wrong_kernel": "test_kernels_mean_what_the_reference_says",
}
FILES = {
    "test_simdev.py": 26, "test_without_plugin.py": 3, "test_delays.py": 7, "test_training.py": 6, "test_waits.py": 2,
    "test_recordings.py": 5,
}  # fmt: skip
"""The files of the plugin's own tests, and how many tests of each pass at least."""
STEPS = {"cpu": ("doctor", "jax"), "simdev": ("doctor", "kernels", "stages")}
MORE_STEPS = {
    "cpu": ("features", "stages", "two ranks", "check", "check over gloo"),
    "simdev": ("contract", "features", "two ranks", "check", "check over gloo"),
}
"""Steps of `make device` that are rehearsed without one; the second ones by `make test-slow`."""
CONTROL = "test_allocations_are_zero_and_aligned"
"""A test that none of the faults concerns: it stays green, so the suite runs on a device that has one."""
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler (g++)"),
    pytest.mark.skipif(sys.platform != "linux", reason="its memory is a memfd"),
    pytest.mark.timeout(900),  # a build, and a suite of two minutes, on a machine that may be slow and busy
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin installed in it."""
    folder = tmp_path_factory.mktemp("simdev")
    sources = shutil.copytree(PLUGIN, folder / "sources")  # a build leaves files beside them
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*pip, "--target", str(folder / "site"), str(sources)],
        env={**os.environ, "CC": "g++", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"},
        check=True,
        timeout=350,
    )
    return folder / "site"


def run_tests(site: Path, *arguments: str, file: str = "", fault: str = "") -> tuple[int, str]:
    """pytest on the plugin's own tests, or one file of them, in an environment that has it: exit code and output."""
    settings = ["-q", "-p", "no:cacheprovider", "--timeout", "300", "-c", str(ROOT / "pyproject.toml")]
    job = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, *arguments, str(PLUGIN / "tests" / file)],
        env={**os.environ, "PYTHONPATH": str(site), "POLYACCEL_SIMDEV_FAULT": fault},
        capture_output=True,
        text=True,
        timeout=800,
    )
    return job.returncode, job.stdout + job.stderr


@pytest.mark.parametrize("file", FILES)
def test_it_keeps_the_contracts_and_trains(site: Path, file: str) -> None:
    code, output = run_tests(site, file=file)
    assert code == 0, output
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None
    assert int(passed[1]) >= FILES[file], output


def test_it_trains_as_one_rank_does(site: Path) -> None:
    """One training of `test_training.py`, which `make test-slow` runs whole."""
    code, output = run_tests(site, "-k", "ranks_that_share_layers", file="test_training.py")
    assert code == 0, output
    assert re.search(r"\b1 passed\b", output), output


def test_a_step_waits_where_the_guide_says(site: Path) -> None:
    """One rank of `test_waits.py`, which `make test-slow` runs whole."""
    code, output = run_tests(site, "-k", "waits and 1-", file="test_waits.py")
    assert code == 0, output
    assert re.search(r"\b1 passed\b", output), output


def test_it_plays_recordings(site: Path) -> None:
    """All but two ranks of `test_recordings.py`, which `make test-slow` runs whole."""
    code, output = run_tests(site, "-k", "not launched_ones or 1", file="test_recordings.py")
    assert code == 0, output
    assert re.search(r"\b4 passed\b", output), output


@pytest.mark.parametrize("device", STEPS)
def test_make_device_is_rehearsed(site: Path, tmp_path: Path, device: str) -> None:
    rehearse(site, tmp_path, device, STEPS[device])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("device", MORE_STEPS)
def test_the_rest_of_make_device_is_rehearsed(site: Path, tmp_path: Path, device: str) -> None:
    rehearse(site, tmp_path, device, MORE_STEPS[device])


def rehearse(site: Path, out: Path, device: str, steps: tuple[str, ...]) -> None:
    """Run `tests/device` twice: the second time nothing is left to do."""
    command = [sys.executable, str(ROOT / "tests" / "device"), "--device", device, "--out", str(out), "--rehearsal"]
    for expected in (sorted(steps), []):
        job = subprocess.run(
            [*command, "--together", "1", "--only", *steps],
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=3500,
        )
        assert job.returncode == 0, job.stdout + (out / "log.txt").read_text(encoding="utf-8")
        passed = [line.partition(" passed ")[0].strip() for line in job.stdout.splitlines()]
        assert sorted(passed) == expected


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_the_right_test_red(site: Path, fault: str) -> None:
    """Without the fault it is green: `test_it_keeps_the_contracts_and_trains`."""
    code, output = run_tests(site, "-k", f"TestSimdev and ({FAULTS[fault]} or {CONTROL})", fault=fault)
    assert code == 1, output
    assert re.findall(r"FAILED \S+::(\w+)", output) == [FAULTS[fault]], output
    assert re.search(r"\b1 failed, 1 passed\b", output), output


def test_a_device_that_is_named_is_used_and_one_that_is_not_named_is_not(site: Path) -> None:
    script = "import polyaccel; print(polyaccel.get_accelerator().name)"
    for chosen, found in (("simdev", "simdev"), (None, "cpu")):
        environ = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
        environ |= {"PYTHONPATH": str(site)} | ({"DS_ACCELERATOR": chosen} if chosen else {})
        said = subprocess.run(
            [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=280, check=True
        )
        assert said.stdout.split() == [found]


def test_memory_of_the_device_is_not_the_hosts(site: Path) -> None:
    """Whoever takes a device pointer for the host's dies of it, instead of computing something."""
    script = """
import ctypes, torch, polyaccel_simdev.device
value = torch.ones(4, device="simdev")
torch.simdev.synchronize()
print(value.sum().item(), flush=True)
ctypes.string_at(value.data_ptr(), 4)
"""
    said = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert said.stdout.split() == ["4.0"]
    assert said.returncode == -11
