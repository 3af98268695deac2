"""zlib's crc32, three to four times as fast where csrc/files/checksum.cpp was compiled for this processor."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_uint32, c_void_p
from functools import cache

import numpy as np

from polyaccel.ops.native.library import native

_WORTH_NBYTES = 4096
"""Shorter data is done before a call of the library has begun."""


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """The crc32 of `data`, as `zlib.crc32` gives it, where `value` is that of the bytes before. Without Python's lock
    for long data."""
    fast = _native_crc32() if len(data) >= _WORTH_NBYTES else None
    if fast is None:
        return zlib.crc32(data, value)
    memory = np.frombuffer(data, np.uint8)
    return fast(value, memory.ctypes.data, memory.nbytes)


@cache
def _native_crc32() -> Callable[[int, int, int], int] | None:
    library = native().library
    if library is None:
        return None
    library.pa_crc32_is_fast.restype = c_int32
    library.pa_crc32.restype, library.pa_crc32.argtypes = c_uint32, (c_uint32, c_void_p, c_int64)
    function: Callable[[int, int, int], int] = library.pa_crc32
    return function if library.pa_crc32_is_fast() else None
