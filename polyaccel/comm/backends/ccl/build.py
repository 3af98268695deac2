"""Where oneCCL is, and the compiling of csrc/ccl against it: at installation or by `polyaccel plugins build ccl`.

oneCCL is Intel's to distribute, and its C++ interface is that of one version. So what calls it is compiled where it is
found, and belongs to that installation: `pip install` puts it next to the package, `polyaccel plugins build ccl` into
the user's cache, which also works where the package cannot be written to.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from polyaccel.core.user_dirs import cache_folder
from polyaccel.errors import CommError

_HEADER = Path("include", "oneapi", "ccl.hpp")
_VERSION_HEADER = Path("include", "oneapi", "ccl", "config.h")
_VERSION = re.compile(r"#define\s+CCL_(?:MAJOR|MINOR|UPDATE)_VERSION\s+(\d+)")
_INSTALLED = Path("lib", "libpolyaccel_ccl.so")
_STAMP = re.compile(rb"polyaccel_ccl ABI (\d+) for oneCCL ([\d.]+)\0")
_BUILD_TIMEOUT_S = 300
ABI_VERSION = 2
GET_ONECCL = "pip install oneccl-devel, or set CCL_ROOT to an installation"


@dataclass(frozen=True)
class OneCcl:
    """An installation of oneCCL below `root`, headers included."""

    root: Path
    version: str

    @property
    def library(self) -> Path:
        return self.root / "lib" / "libccl.so"


def find_oneccl() -> OneCcl | None:
    """The installation at `CCL_ROOT`, else that of this Python's environment, else the user's; None without headers."""
    for root in _roots():
        if (root / _HEADER).exists() and (root / _VERSION_HEADER).exists():
            numbers = _VERSION.findall((root / _VERSION_HEADER).read_text(errors="replace"))
            return OneCcl(root, ".".join(numbers))
    return None


def compiled(oneccl: OneCcl) -> Path:
    """Return the library compiled against `oneccl`: the user's build before pip's. Raises CommError if stale."""
    built = _built(oneccl)
    if built.exists():
        return built
    message = f"csrc/ccl is not compiled for oneCCL {oneccl.version}"
    for path in (folder / _INSTALLED for folder in _package_folders()):
        if path.exists():
            found = _STAMP.search(path.read_bytes())
            abi, version = (text.decode() for text in found.groups()) if found else ("", "")
            if (abi, version) == (str(ABI_VERSION), oneccl.version):
                return path
            of = f"oneCCL {version}, and {oneccl.version} is here" if abi == str(ABI_VERSION) else "another polyaccel"
            message = f"{path} is stale: it was compiled for {of}"
    raise CommError(message, hint="run `polyaccel plugins build ccl`", value=oneccl.version)


def build() -> Path:
    """Compile csrc/ccl into the user's cache. Raises CommError where something is missing or fails."""
    if sys.platform != "linux":
        raise CommError(f"oneCCL is a library for Linux, and this is {sys.platform}", value=sys.platform)
    oneccl = find_oneccl()
    if oneccl is None:
        looked = ", ".join(str(root / _HEADER) for root in _roots())
        raise CommError(f"the headers of oneCCL are not installed (looked for {looked})", hint=GET_ONECCL, value=looked)
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None or shutil.which(compiler.split()[0]) is None:
        named = f"CXX={compiler} is not there" if compiler else "there is no c++, g++ or clang++"
        raise CommError(
            f"no C++ compiler to build with: {named}",
            hint="install one (Debian: apt-get install g++), or set CXX",
            value=compiler,
        )
    target = _built(oneccl)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        _compile([*compiler.split(), *_arguments(oneccl), "-o", str(made)])
        made.replace(target)
    return target


def _arguments(oneccl: OneCcl) -> list[str]:
    """RPATH and not RUNPATH: only the first is also searched for what oneCCL itself needs."""
    return [
        *("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
        *(f"-I{oneccl.root / 'include'}", str(_source()), str(oneccl.library)),
        f"-Wl,--disable-new-dtags,-rpath,{oneccl.library.parent}",
    ]


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommError(f"{command[0]} cannot compile csrc/ccl: {error}", value=command) from error
    if done.returncode:
        raise CommError(
            f"{command[0]} cannot compile csrc/ccl (exit code {done.returncode}):\n{done.stderr.strip()}",
            hint="a GCC or Clang with C++17, and an oneCCL of 2021.15 or later, are needed",
            value=command,
        )


def _source() -> Path:
    source = next((path for path in _sources() if path.exists()), None)
    if source is None:
        raise CommError(
            "csrc/ccl is not in this installation: polyaccel was installed without compiling",
            hint="install CMake and a C++ compiler (GCC or Clang), then polyaccel again",
        )
    return source


def _sources() -> Iterator[Path]:
    """In the source tree, and in an installation."""
    package = Path(__file__).parents[3]
    yield from (folder / "csrc" / "ccl" / "ccl.cpp" for folder in (package.parent, package))


def _built(oneccl: OneCcl) -> Path:
    """Where the build for this oneCCL goes: another version, place or source is another file."""
    source = _source()
    texts = [str(oneccl.root), oneccl.version, source.read_text(), source.with_suffix(".h").read_text()]
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    return cache_folder() / f"libpolyaccel_ccl-{oneccl.version}-{key}.so"


def _roots() -> list[Path]:
    stated = os.environ.get("CCL_ROOT")
    return [Path(root) for root in (stated, sys.prefix, site.getuserbase()) if root]


def _package_folders() -> Iterator[Path]:
    """Next to this package, and where pip put what it compiled while the sources are used where they lie."""
    yield Path(__file__).parents[3]
    try:
        yield Path(str(metadata.distribution("polyaccel").locate_file("polyaccel")))
    except metadata.PackageNotFoundError:
        return
