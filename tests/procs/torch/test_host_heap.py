"""What a step frees and the next one needs stays in the process, in a process of its own: malloc is set up but once."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from polyaccel.launch.base import Job
from polyaccel.launch.plan import plan_host
from polyaccel.launch.program import HUGE_PAGES

_PROGRAM = """
import ctypes, resource, sys
from polyaccel.accelerators.memory.host import keep_freed_memory

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes = [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
NBYTES = 12 << 20

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [library.malloc(NBYTES) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, NBYTES)
    for block in blocks:
        library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step()
is_kept = keep_freed_memory() if "keep" in sys.argv else False
step()
print(is_kept, step())
"""

PLAIN = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")


def faults_of(*argv: str, **environment: str) -> tuple[bool, int]:
    """Whether freed memory is kept, and the page faults of the third step over 48 MiB."""
    command = [sys.executable, "-c", _PROGRAM, *argv]
    done = subprocess.run(
        command, env={**PLAIN, **environment}, timeout=120, check=True, capture_output=True, text=True
    )
    is_kept, faults = done.stdout.split()
    return is_kept == "True", int(faults)


def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert faults_of()[1] > 1000  # what malloc does by itself
    is_kept, faults = faults_of("keep")
    assert is_kept
    assert faults < 100


def test_memory_is_kept_beside_the_launchers_huge_pages() -> None:
    is_kept, faults = faults_of("keep", GLIBC_TUNABLES=HUGE_PAGES)
    assert is_kept
    assert faults < 100


_LARGE = """
import ctypes, sys
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes = [ctypes.c_size_t]
block = library.malloc(90 << 20)
found = None
for line in open("/proc/self/smaps"):
    first, _, rest = line.partition(" ")
    if "-" in first:
        begin, end = (int(part, 16) for part in first.split("-"))
        found = begin <= block + (1 << 20) < end
    elif first == "VmFlags:" and found:
        print("hg" in rest.split())
"""


def test_large_blocks_of_a_launched_rank_ask_for_huge_pages() -> None:
    if not _THP.exists() or "[never]" in _THP.read_text():
        pytest.skip("this kernel has no transparent huge pages")
    if tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 35):
        pytest.skip("glibc before 2.35")
    (spec,) = plan_host(Job(command=(sys.executable, "-c", _LARGE), hosts={"here": (0,)}), 0, PLAIN).ranks
    command = [sys.executable, "-c", _LARGE]
    for environment, is_huge in ((spec.environment, "True"), (PLAIN, "False")):
        done = subprocess.run(command, env=environment, timeout=120, check=True, capture_output=True, text=True)
        assert done.stdout.strip() == is_huge


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_users_own_settings_stay(name: str) -> None:
    value = "glibc.malloc.trim_threshold=65536" if name == "GLIBC_TUNABLES" else "65536"
    is_kept, faults = faults_of("keep", **{name: value})
    assert not is_kept
    assert faults > 1000
