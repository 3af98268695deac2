"""The numbers that the contract of communicators moves, and how results are compared with what they must be."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import PolyaccelError
from polyaccel.testkit import comparison
from polyaccel.testkit.progress import doing

Array = npt.NDArray[Any]
SIZES = (0, 1, 7, 640, 20_011)  # the last is beyond what backends call small
DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64, DType.INT64, DType.INT32, DType.UINT8)
_COMBINE: dict[ReduceOp, Callable[[Any, Any], Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
    ReduceOp.PROD: np.multiply,
}


def put(comm: Communicator, values: npt.ArrayLike, dtype: DType) -> Buffer:
    """A new buffer that holds `values`, rounded to `dtype`."""
    wide = _widest(comm, dtype)
    array = np.ascontiguousarray(values, dtype=wide.value)
    source = comm.accelerator.allocate(array.size, wide)
    source.from_bytes(array.tobytes())
    buffer = comm.allocate(array.size, dtype)
    buffer.copy_from(source)
    return buffer


def get(comm: Communicator, buffer: Buffer) -> Array:
    """The contents of `buffer` as float64 or int64."""
    wide = _widest(comm, buffer.dtype)
    copy = comm.accelerator.allocate(buffer.numel, wide)
    copy.copy_from(buffer)
    numbers = np.frombuffer(copy.to_bytes(), dtype=wide.value)
    return numbers.astype(np.float64 if buffer.dtype.is_floating else np.int64, copy=False)


def _widest(comm: Communicator, dtype: DType) -> DType:
    """The type of the device that holds every number of `dtype`: some devices have none of 64 bits."""
    wide, narrow = (DType.FLOAT64, DType.FLOAT32) if dtype.is_floating else (DType.INT64, DType.INT32)
    return wide if wide in comm.accelerator.supported_dtypes() else narrow


def values_of(rank: int, numel: int, *, salt: int = 0) -> Array:
    """Small positive integers that differ between ranks and places; products over four ranks fit into a byte."""
    return (np.arange(numel) * 7 + rank * 3 + salt) % 4 + 1


def combined(comm: Communicator, numel: int, op: ReduceOp, *, salt: int = 0) -> Array:
    """The result that a reduction of every rank's `values_of` must have."""
    total: Array = reduce(_COMBINE[op], [values_of(rank, numel, salt=salt) for rank in range(comm.world_size)])
    return total / comm.world_size if op is ReduceOp.AVG else total


def expect(comm: Communicator, buffer: Buffer, expected: Array, what: str) -> int:
    """Compare within the rounding of one division a level of sums; returns 1, the number of checks made."""
    doing(what)
    found = get(comm, buffer)
    levels = 2 if comm.summed_first else 1
    rtol = levels * {DType.BFLOAT16: 2**-8, DType.FLOAT16: 2**-11}.get(buffer.dtype, 1e-6)
    comparison.same_numbers(found, expected, f"{what} on rank {comm.rank} of {comm.world_size}", rtol=rtol)
    return 1


def refused(kind: type[PolyaccelError], call: Callable[[], Any], what: str) -> int:
    """Check that `call` raises `kind`; returns 1."""
    comparison.refused(call, what, kind)
    return 1


def dtypes_of(comm: Communicator) -> list[DType]:
    return [dtype for dtype in DTYPES if dtype in comm.accelerator.supported_dtypes()]
