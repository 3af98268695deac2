"""The compiled half of the host's kernels: finding, loading and describing `libpolyaccel_cpu`.

`pip install` compiles csrc/ where it finds CMake and a C++ compiler, and installs without where it does not. Nothing is
compiled later. csrc/kernels/kernels.h declares the functions, and its version has to be `ABI_VERSION`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from polyaccel.errors import ConfigError, InvariantError, Problem

ABI_VERSION = 6
VARIABLE = "POLYACCEL_NATIVE"
"""Environment variable: "off", or the instruction set to use instead of this processor's best one."""

_ISAS = ("avx512", "avx2", "portable", "neon")
_FILE = Path("lib", "libpolyaccel_cpu.dylib" if sys.platform == "darwin" else "libpolyaccel_cpu.so")
_HINT = "install CMake and a C++ compiler (GCC or Clang), then polyaccel again"


class CArray(ctypes.Structure):
    """`pa_array`: the address of the first element, and the code of the element type."""

    _fields_ = (("data", c_void_p), ("type", c_int32))


class CRounding(ctypes.Structure):
    """`pa_rounding`: the halves of the key, the lower first, and the index of the first element."""

    _fields_ = (("key", c_uint32 * 2), ("start", c_uint64))


class CUpdateShape(ctypes.Structure):
    """`pa_shape`: an update's name (None: the update does not exist), and how much it takes."""

    _fields_ = (("name", c_char_p), ("arrays", c_int32), ("constants", c_int32))


_SIGNATURES: dict[str, tuple[type | None, ...]] = {
    "pa_choose_isa": (c_char_p,),
    "pa_update_shape": (c_int32,),
    "pa_update": (
        *(c_int32, c_int64, POINTER(CArray), c_int32, CArray, POINTER(c_double), c_int32),
        *(POINTER(CRounding), c_int32),
    ),
    "pa_combine": (c_int32, c_int64, c_int32, c_void_p, c_void_p, c_int32),
    "pa_square_sums": (c_void_p, c_int64, POINTER(c_int64), POINTER(CArray), POINTER(c_int64), c_int32),
    "pa_quantize": (c_int32, c_int64, c_int64, CArray, c_void_p, c_void_p, c_int32),
    "pa_dequantize": (c_int32, c_int64, c_int64, CArray, c_void_p, c_void_p, c_int32),
    "pa_products_scratch": (c_int64, c_void_p, c_int32),
    "pa_products": (c_int64, c_void_p, c_void_p, c_void_p, c_int32),
}


@dataclass(frozen=True)
class Native:
    """The loaded library and its path, or None and the reason why it is not used."""

    library: ctypes.CDLL | None
    reason: str

    @property
    def isa(self) -> str:
        """The instruction set in use; empty without a library."""
        return self.library.pa_isa().decode() if self.library else ""

    def update_kinds(self) -> dict[str, int]:
        """The codes of `pa_update`, by the names of csrc/kernels/updates.h."""
        kinds: dict[str, int] = {}
        while self.library is not None and (found := self.library.pa_update_shape(len(kinds)).name) is not None:
            kinds[found.decode()] = len(kinds)
        return kinds

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the library, without the GIL. Raises InvariantError when it refuses its arguments."""
        code = getattr(self.library, name)(*arguments)
        if code:
            raise InvariantError(f"{name} refused its arguments with code {code}", value=arguments)


@cache
def native() -> Native:
    """The library of this installation, loaded once. Raises ConfigError for a value of `POLYACCEL_NATIVE` that this
    processor cannot run."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "off":
        return Native(None, f"{VARIABLE}=off")
    path = _find()
    if path is None:
        return Native(None, f"csrc/ was not compiled when polyaccel was installed; {_HINT}")
    try:
        library = ctypes.CDLL(str(path))
        version = library.pa_abi_version()
    except (OSError, AttributeError) as error:
        return Native(None, f"{path} cannot be loaded ({error}); {_HINT}")
    if version != ABI_VERSION:
        return Native(None, f"{path} is of another version ({version}, not {ABI_VERSION}); install polyaccel again")
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    library.pa_isa.restype = c_char_p
    library.pa_products_scratch.restype = c_int64
    library.pa_update_shape.restype = CUpdateShape
    if wanted and library.pa_choose_isa(wanted.encode()):
        expected = f"one of off, {', '.join(_ISAS)}, as far as this processor has it"
        raise ConfigError([Problem(VARIABLE, wanted, expected, "unset it")], source="environment")
    return Native(library, str(path))


def describe_native() -> str:
    """One line for reports: the instruction set and the library's path, or the reason why there is none."""
    found = native()
    return f"csrc {found.isa} ({found.reason})" if found.library else f"none: {found.reason}"


def host_threads() -> int:
    """Return how many threads a kernel may use where no framework sets it: `OMP_NUM_THREADS`, or the usable cores."""
    stated = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if stated.isdigit() and int(stated):
        return int(stated)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _find() -> Path | None:
    """Next to this package; or, when its sources are used where they lie, where pip put what it compiled."""
    local = Path(__file__).parents[2] / _FILE
    if local.exists():
        return local
    try:
        installed = Path(str(metadata.distribution("polyaccel").locate_file(Path("polyaccel", _FILE))))
    except metadata.PackageNotFoundError:
        return None
    return installed if installed.exists() else None
