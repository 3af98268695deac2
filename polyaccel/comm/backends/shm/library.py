"""The compiled half of the shm backend: csrc/shm/shm.h as ctypes sees it."""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from functools import cache

from polyaccel.accelerators.base import Probe
from polyaccel.comm.base import unusable_error
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import ConfigError
from polyaccel.ops.native import native

MOST_RANKS = 256


class ShmOp(IntEnum):
    """`pa_shm_op`."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    ALL_TO_ALL = 5
    GATHER = 6
    SCATTER = 7


class Status(IntEnum):
    """`pa_shm_status`."""

    OK = 0
    TIMEOUT = 1
    DEAD = 2
    LEFT = 3
    MISMATCH = 4
    BROKEN = 5
    NO_MEMORY = 6
    BAD_CALL = 7
    INTERRUPTED = 8


DTYPES = (
    DType.FLOAT64,
    DType.FLOAT32,
    DType.BFLOAT16,
    DType.FLOAT16,
    DType.INT64,
    DType.INT32,
    DType.INT16,
    DType.INT8,
    DType.UINT8,
)
DTYPE_CODES = {**{dtype: code for code, dtype in enumerate(DTYPES)}, DType.BOOL: DTYPES.index(DType.UINT8)}
REDUCES = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PROD, ReduceOp.AVG)
REDUCE_CODES = {op: code for code, op in enumerate(REDUCES)}


class CallKey(ctypes.Structure):
    """`pa_shm_told`: what the ranks agree on, and where this rank's buffer is."""

    _fields_ = (
        ("op", c_int32),
        ("type", c_int32),
        ("reduce", c_int32),
        ("root", c_int32),
        ("numel", c_int64),
        ("is_shared", c_int32),
        ("parts", c_uint32),
        ("most", c_int64),
        ("base", c_int64),
        ("length", c_int64),
        ("delta", c_int64),
    )


class ShmCall(ctypes.Structure):
    """`pa_shm_call`."""

    _fields_ = (
        ("key", CallKey),
        ("source", c_void_p),
        ("out", c_void_p),
        ("timeout_ns", c_int64),
        ("spin_ns", c_int64),
        ("heeds_signals", c_int32),
        ("unused", c_int32),
        ("bounds", c_void_p),
        ("in_bounds", c_void_p),
        ("pieces", c_void_p),
        ("piece_count", c_int64),
        ("cuts_in", c_int32),
        ("unused_too", c_int32),
    )


class CPython(ctypes.Structure):
    """`pa_shm_python`: addresses of functions of Python's C API."""

    _fields_ = (("release", c_void_p), ("take", c_void_p), ("check_signals", c_void_p))


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "pa_shm_control_nbytes": (c_int64, (c_int32,)),
    "pa_shm_open": (c_void_p, (c_void_p, c_int32, c_int32, POINTER(c_int32), POINTER(c_uint64), POINTER(c_int32))),
    "pa_shm_leave": (None, (c_void_p,)),
    "pa_shm_free": (None, (c_void_p,)),
    "pa_shm_set_python": (None, (POINTER(CPython),)),
    "pa_shm_map": (c_void_p, (c_int32, c_int64, c_int64)),
    "pa_shm_unmap": (None, (c_void_p, c_int32, c_int64, c_int64, c_int32)),
}
# All addresses: converting arguments costs as much as the call.
_WAITING_SIGNATURES: dict[str, tuple[type, ...]] = {
    "pa_shm_collective": (c_void_p, c_void_p, c_void_p, c_void_p),
    "pa_shm_send": (c_void_p, c_int32, c_void_p, c_void_p),
    "pa_shm_recv": (c_void_p, c_int32, c_void_p, c_void_p, c_void_p),
}


def probe_library() -> Probe:
    """Whether this system and this installation can share memory between ranks."""
    if sys.platform != "linux":
        return Probe(False, f"shared memory between ranks needs Linux, not {sys.platform}")
    try:
        found = native()
    except ConfigError as error:
        return Probe(False, str(error))
    if found.library is None:
        return Probe(False, found.reason)
    if not hasattr(found.library, "pa_shm_set_python"):
        return Probe(False, f"{found.reason} was compiled without csrc/shm; install polyaccel again")
    return Probe(True, f"shared memory between the processes of this host ({found.reason})")


@cache
def shm_library() -> ctypes.CDLL:
    """The library with its signatures set. Raises CommError where `probe_library` finds none."""
    probe = probe_library()
    library = native().library if probe.usable else None
    if library is None:
        raise unusable_error("shm", probe.reason)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    api = (
        ctypes.pythonapi.PyEval_SaveThread,
        ctypes.pythonapi.PyEval_RestoreThread,
        ctypes.pythonapi.PyErr_CheckSignals,
    )
    library.pa_shm_set_python(CPython(*(ctypes.cast(function, c_void_p) for function in api)))
    return library


@cache
def waiting_library() -> ctypes.PyDLL:
    """Load the functions that wait for peers; they release the interpreter's lock and run signal handlers."""
    library = ctypes.PyDLL(shm_library()._name)
    for name, arguments in _WAITING_SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = c_int32, arguments
    return library
