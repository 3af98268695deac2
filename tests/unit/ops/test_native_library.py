"""With, without and with the wrong library: what is used, and what a report says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.errors import ConfigError
from polyaccel.ops import native as native_library
from polyaccel.ops.base import UPDATE
from polyaccel.ops.native import VARIABLE, describe_native, host_threads, native, native_kernels

FALLBACK = CpuAccelerator("numpy", native=False).kernels()


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """`native()` looks again, in this test only."""
    monkeypatch.setattr(native_library, "native", native_library.native.__wrapped__)
    monkeypatch.setattr("polyaccel.ops.native.native", native_library.native)
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.usefixtures("_fresh")
def test_switched_off_it_leaves_the_table_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    assert native_kernels(FALLBACK, lambda: 1) is FALLBACK
    assert describe_native() == "none: POLYACCEL_NATIVE=off"


@pytest.mark.usefixtures("_fresh")
def test_what_was_not_compiled_is_said_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "_find", lambda: None)
    assert native_kernels(FALLBACK, lambda: 1) is FALLBACK
    assert "install CMake and a C++ compiler" in describe_native()


@pytest.mark.usefixtures("_fresh")
def test_a_damaged_library_is_said_and_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damaged = tmp_path / "libpolyaccel_cpu.so"
    damaged.write_bytes(b"\x7fELF, or what is left of it")
    monkeypatch.setattr(native_library, "_find", lambda: damaged)
    assert native_kernels(FALLBACK, lambda: 1) is FALLBACK
    assert f"none: {damaged} cannot be loaded" in describe_native()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.skipif(native().library is None, reason=native().reason)
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "ABI_VERSION", 10**6)
    assert native_kernels(FALLBACK, lambda: 1) is FALLBACK
    assert "is of another version" in describe_native()


@pytest.mark.skipif(native().library is None, reason=native().reason)
@pytest.mark.parametrize(("wanted", "expected"), [("portable", "csrc portable"), ("neon", "csrc neon"), ("", "csrc ")])
def test_an_instruction_set_can_be_asked_for(wanted: str, expected: str) -> None:
    script = "from polyaccel.ops.native import describe_native; print(describe_native())"
    environment = {**os.environ, VARIABLE: wanted}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    # A processor has one of the two under test.
    assert done.stdout.startswith(expected) or (wanted and f'{VARIABLE} = "{wanted}"' in done.stderr)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.skipif(native().library is None, reason=native().reason)
def test_an_unknown_instruction_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "abacus")
    with pytest.raises(ConfigError) as caught:
        native_kernels(FALLBACK, lambda: 1)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("POLYACCEL_NATIVE", "abacus")]
    assert "avx512" in str(caught.value)


def test_the_cpu_can_do_without() -> None:
    assert CpuAccelerator("numpy", native=False).kernels().provider(UPDATE) == "numpy"
    assert CpuAccelerator("torch", native=False).kernels().provider(UPDATE) == "torch"


@pytest.mark.parametrize(("stated", "expected"), [("3", 3), ("2,1", 2)])
def test_threads_follow_openmps_variable(monkeypatch: pytest.MonkeyPatch, stated: str, expected: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert host_threads() == expected


@pytest.mark.parametrize("stated", ["", "0", "many"])
def test_threads_default_to_the_usable_cores(monkeypatch: pytest.MonkeyPatch, stated: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert 1 <= host_threads() <= (os.cpu_count() or 1)
