"""The compiled half of the ccl backend: csrc/ccl/ccl.h as ctypes sees it."""

from __future__ import annotations

import atexit
import ctypes
import os
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType

from polyaccel.comm.backends.ccl.build import ABI_VERSION, GET_ONECCL, compiled, find_oneccl
from polyaccel.comm.base import unusable_error
from polyaccel.core.types import DType, Probe, ReduceOp
from polyaccel.errors import CommError

ADDRESS_NBYTES = 256

SETTINGS = MappingProxyType(
    {
        "CCL_PROCESS_LAUNCHER": "none",  # ranks come from the rendezvous, also under mpirun
        "CCL_ATL_TRANSPORT": "ofi",
        "CCL_ATL_SHM": "1",
        "CCL_WORKER_OFFLOAD": "0",  # its threads spin, and take the cores from the ranks
        "CCL_LOG_LEVEL": "error",
    }
)
"""Settings of oneCCL that are set where the user's environment does not have them."""


class CclOp(IntEnum):
    """`pa_ccl_op`."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    ALL_TO_ALL = 5


class State(IntEnum):
    """`pa_ccl_state`."""

    DONE = 0
    PENDING = 1
    FAILED = 2


_DTYPES = (
    *(DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16),
    *(DType.INT64, DType.INT32, DType.INT16, DType.INT8, DType.UINT8),
)
DTYPE_CODES = {**{dtype: code for code, dtype in enumerate(_DTYPES)}, DType.BOOL: _DTYPES.index(DType.UINT8)}
REDUCE_CODES = {op: code for code, op in enumerate((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PROD))}


class CclCall(ctypes.Structure):
    """`pa_ccl_call`."""

    _fields_ = (
        ("op", c_int32),
        ("type", c_int32),
        ("reduce", c_int32),
        ("root", c_int32),
        ("numel", c_int64),
        ("source", c_void_p),
        ("out", c_void_p),
    )


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "pa_ccl_built_for": (c_char_p, ()),
    "pa_ccl_loaded": (c_char_p, ()),
    "pa_ccl_guard_exit": (None, ()),
    "pa_ccl_new_group": (c_void_p, ()),
    "pa_ccl_host": (c_void_p, (c_void_p, c_char_p)),
    "pa_ccl_join": (c_void_p, (c_void_p, c_char_p, c_int32, c_int32)),
    "pa_ccl_collective": (c_void_p, (c_void_p, POINTER(CclCall))),
    "pa_ccl_leave": (c_void_p, (c_void_p,)),
    "pa_ccl_wait": (c_int32, (c_void_p, c_int64)),
    "pa_ccl_error": (c_char_p, (c_void_p,)),
    "pa_ccl_free": (None, (c_void_p,)),
}


def probe_library() -> Probe:
    """Whether oneCCL is here and csrc/ccl was compiled for it. Loads neither."""
    oneccl = find_oneccl()
    if oneccl is None:
        return Probe(False, f"oneCCL is not installed: {GET_ONECCL}, then `polyaccel plugins build ccl`")
    try:
        path = compiled(oneccl)
    except CommError as error:
        return Probe(False, f"{error.message}: {error.hint}")
    return Probe(True, f"oneCCL {oneccl.version} in {oneccl.root} ({path})")


@cache
def ccl_library() -> ctypes.CDLL:
    """The library, with oneCCL's settings in the environment. Raises CommError where there is none that fits."""
    oneccl = find_oneccl()
    if oneccl is None:
        raise unusable_error("ccl", probe_library().reason)
    path = compiled(oneccl)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    library = load(path)
    atexit.register(library.pa_ccl_guard_exit)
    return library


def load(path: Path) -> ctypes.CDLL:
    """The library at `path` with its signatures set. Raises CommError unless it is of this polyaccel and oneCCL."""
    hint = "run `polyaccel plugins build ccl` again"
    try:
        library = ctypes.CDLL(str(path))
        version = library.pa_ccl_abi_version()
        if version != ABI_VERSION:
            raise CommError(f"{path} is of another polyaccel ({version}, not {ABI_VERSION})", hint=hint, value=version)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise CommError(f"{path} cannot be loaded: {error}", hint=hint, value=str(path)) from error
    built, loaded = library.pa_ccl_built_for().decode(), library.pa_ccl_loaded().decode()
    if built != loaded:
        raise CommError(f"{path} was compiled for oneCCL {built}, but {loaded} was loaded", hint=hint, value=loaded)
    return library
