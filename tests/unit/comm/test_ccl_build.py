"""Finding oneCCL and compiling against it, as far as that goes without oneCCL."""

from __future__ import annotations

import ctypes
import re
import site
import sys
from pathlib import Path

import pytest

from polyaccel import comm
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.cli.doctor import libraries as doctor_libraries
from polyaccel.cli.main import main
from polyaccel.comm.backends.ccl import build as ccl_build
from polyaccel.comm.backends.ccl import library as ccl_library
from polyaccel.comm.backends.ccl.backend import CclBackend
from polyaccel.comm.base import Rendezvous
from polyaccel.errors import CommError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="oneCCL is a library for Linux")
COMPILER = """#!/bin/sh
printf '%s\\n' "$@" > "{folder}/arguments"
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


@pytest.fixture
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without oneCCL, with an empty cache."""
    monkeypatch.delenv("CCL_ROOT", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setattr(site, "getuserbase", lambda: str(tmp_path / "user"))
    monkeypatch.setattr(ccl_build, "_package_folders", lambda: [tmp_path / "package"])
    return tmp_path


def install(root: Path, version: tuple[int, int, int] = (2021, 15, 7)) -> None:
    """What of oneCCL's headers is looked at."""
    (root / "include" / "oneapi" / "ccl").mkdir(parents=True)
    (root / "include" / "oneapi" / "ccl.hpp").touch()
    names = ("MAJOR", "MINOR", "UPDATE")
    lines = [f"#define CCL_{name}_VERSION   {number}\n" for name, number in zip(names, version, strict=True)]
    (root / "include" / "oneapi" / "ccl" / "config.h").write_text("".join(lines))


def install_library(folder: Path, version: str, abi: int = ccl_build.ABI_VERSION) -> Path:
    """What pip has compiled, of which the stamp is looked at; one without is older than stamps."""
    library = folder / "package" / "lib" / "libpolyaccel_ccl.so"
    library.parent.mkdir(parents=True)
    stamp = f"polyaccel_ccl ABI {abi} for oneCCL {version}\0" if version else ""
    library.write_bytes(b"\x7fELF\0" + stamp.encode() + b"\0more")
    return library


@pytest.fixture
def compiler(nothing: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes down its arguments, and a word instead of a library."""
    script = nothing / "c++"
    script.write_text(COMPILER.format(folder=nothing))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return script


def test_the_installation_that_is_named_goes_before_the_environments(
    nothing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ccl_build.find_oneccl() is None
    install(nothing / "environment")
    assert ccl_build.find_oneccl() == ccl_build.OneCcl(nothing / "environment", "2021.15.7")
    install(nothing / "named", (2022, 1, 0))
    monkeypatch.setenv("CCL_ROOT", str(nothing / "named"))
    assert ccl_build.find_oneccl() == ccl_build.OneCcl(nothing / "named", "2022.1.0")


def test_the_probe_says_what_is_missing(nothing: Path, compiler: Path) -> None:
    probe = CclBackend.probe()
    assert not probe.usable
    assert "pip install oneccl-devel" in probe.reason
    install(nothing / "environment")
    probe = CclBackend.probe()
    assert not probe.usable
    assert probe.reason == "csrc/ccl is not compiled for oneCCL 2021.15.7: run `polyaccel plugins build ccl`"
    with pytest.raises(CommError) as caught:
        CclBackend().connect(Rendezvous(0, 1, 0, 1, None, None, "test"), CpuAccelerator(), timeout_s=1)
    assert caught.value.value == "ccl"
    assert "`polyaccel plugins build ccl`" in str(caught.value)
    built = ccl_build.build()
    probe = CclBackend.probe()
    assert probe.usable
    assert str(built) in probe.reason
    assert "all_reduce_caching, all_to_all_single, barrier" in probe.reason, "what it does, where doctor shows it"


def test_what_it_says_it_does_can_be_called() -> None:
    """But for the plans that are kept, which every small all-reduce has."""
    assert [name for name in CclBackend.available_collectives if not hasattr(comm, name)] == ["all_reduce_caching"]


def test_a_build_goes_into_the_users_cache_and_knows_its_oneccl(nothing: Path, compiler: Path) -> None:
    root = nothing / "environment"
    install(root)
    built = ccl_build.build()
    assert built.read_text() == "compiled\n"
    assert built.parent == nothing / "cache" / "polyaccel"
    assert list(built.parent.iterdir()) == [built], "nothing half made stays"
    arguments = (nothing / "arguments").read_text().splitlines()
    assert f"-I{root}/include" in arguments
    assert f"{root}/lib/libccl.so" in arguments
    assert f"-Wl,--disable-new-dtags,-rpath,{root}/lib" in arguments
    assert any(Path(argument).name == "ccl.cpp" and Path(argument).exists() for argument in arguments)


def test_what_was_compiled_for_another_oneccl_is_not_taken(nothing: Path, compiler: Path) -> None:
    install(nothing / "environment")
    built = ccl_build.build()
    mine = ccl_build.OneCcl(nothing / "environment", "2021.15.7")
    assert ccl_build.compiled(mine) == built
    for other in (("environment", "2022.1.0"), ("elsewhere", "2021.15.7")):
        with pytest.raises(CommError) as caught:
            ccl_build.compiled(ccl_build.OneCcl(nothing / other[0], other[1]))
        assert all(part in str(caught.value) for part in ("csrc/ccl", "oneCCL", str(other[1])))
    installed = install_library(nothing, "2021.15.7")
    assert ccl_build.compiled(mine) == built, "the user's own build goes first"
    built.unlink()
    assert ccl_build.compiled(mine) == installed


@pytest.mark.parametrize(
    ("version", "abi", "reason"),
    [
        ("2022.1.0", ccl_build.ABI_VERSION, "it was compiled for oneCCL 2022.1.0, and 2021.15.7 is here"),
        ("2021.15.7", ccl_build.ABI_VERSION + 1, "it was compiled for another polyaccel"),
        ("", ccl_build.ABI_VERSION, "it was compiled for another polyaccel"),
    ],
)
def test_what_pip_compiled_for_something_else_is_called_stale(
    nothing: Path, compiler: Path, version: str, abi: int, reason: str
) -> None:
    install(nothing / "environment")
    stale = install_library(nothing, version, abi)
    probe = CclBackend.probe()
    assert (probe.usable, probe.reason) == (False, f"{stale} is stale: {reason}: run `polyaccel plugins build ccl`")
    assert probe.reason in doctor_libraries.libraries()["oneCCL"]
    ccl_build.build()
    assert CclBackend.probe().usable, "what the user builds is taken then"


def test_the_command_names_the_pip_package(nothing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "ccl"]) == 1
    said = capsys.readouterr().err
    assert "the headers of oneCCL are not installed" in said
    assert str(nothing / "environment" / "include" / "oneapi" / "ccl.hpp") in said
    assert "hint: pip install oneccl-devel, or set CCL_ROOT" in said


def test_a_missing_compiler_is_named(nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(nothing / "environment")
    monkeypatch.setenv("PATH", str(nothing / "nowhere"))
    with pytest.raises(CommError) as caught:
        ccl_build.build()
    assert "CXX" in caught.value.hint
    monkeypatch.setenv("CXX", "/nonexistent/c++ -march=native")
    with pytest.raises(CommError) as caught:
        ccl_build.build()
    assert caught.value.value == "/nonexistent/c++ -march=native"
    assert "CXX=/nonexistent/c" in str(caught.value)


def test_the_compilers_words_are_shown(nothing: Path, compiler: Path) -> None:
    install(nothing / "environment")
    compiler.write_text("#!/bin/sh\necho 'ccl.cpp: no such template' >&2\nexit 3\n")
    with pytest.raises(CommError) as caught:
        ccl_build.build()
    assert "ccl.cpp" in str(caught.value)
    assert not CclBackend.probe().usable


class Library:
    """What ctypes would show of a library."""

    def __init__(self, *, abi: int = ccl_build.ABI_VERSION, built: str = "2021.15.7", lacks: str = "") -> None:
        for name in ccl_library._SIGNATURES.keys() - {lacks}:
            setattr(self, name, lambda: None)
        self.pa_ccl_abi_version = lambda: abi
        self.pa_ccl_built_for, self.pa_ccl_loaded = (lambda: built.encode()), (lambda: b"2021.15.7")


@pytest.mark.parametrize(
    ("library", "value"),
    [
        # Of an older polyaccel, which lacks functions too: the version is looked at before them.
        (Library(abi=1, lacks="pa_ccl_guard_exit"), 1),
        (Library(abi=99), 99),
        (Library(lacks="pa_ccl_leave"), "lib.so"),
        (Library(built="2022.1.0"), "2021.15.7"),
    ],
    ids=["older", "newer", "incomplete", "of another oneCCL"],
)
def test_a_library_that_does_not_fit_is_refused(
    library: Library, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda path: library)
    with pytest.raises(CommError) as caught:
        ccl_library.load(Path("lib.so"))
    assert caught.value.value == value
    assert caught.value.hint == "run `polyaccel plugins build ccl` again"


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")
    with pytest.raises(CommError) as caught:
        ccl_library.load(broken)
    assert caught.value.value == str(broken)
    assert "`polyaccel plugins build ccl`" in str(caught.value)


def test_python_declares_what_the_header_does() -> None:
    header = (Path(__file__).parents[3] / "csrc" / "ccl" / "ccl.h").read_text()
    functions = re.findall(r"^PA_CCL_EXPORT .*?(pa_ccl_\w+)\(", header, re.MULTILINE)
    assert sorted(functions) == sorted([*ccl_library._SIGNATURES, "pa_ccl_abi_version"])
    constants = dict(re.findall(r"#define (PA_CCL_\w+) (\d+)", header))
    assert constants["PA_CCL_ABI_VERSION"] == str(ccl_build.ABI_VERSION)
    assert constants["PA_CCL_ADDRESS_NBYTES"] == str(ccl_library.ADDRESS_NBYTES)
