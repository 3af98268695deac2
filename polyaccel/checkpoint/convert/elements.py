"""The elements of a saved tensor in host memory, a run at a time, without any array framework.

Every element type is handled as the bytes that it is; those that numpy does not have (bfloat16) are converted by their
bits. Memory is that of a run: the 16 MiB of a piece, or the whole tensor where ranks stored blocks of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.checkpoint import CheckpointReader, TensorEntry
from polyaccel.core.buffer import Buffer, CountedBuffer, WriteCount
from polyaccel.core.types import DeviceId, DType
from polyaccel.errors import CheckpointError, ShardingError

Array = npt.NDArray[Any]


class BytesBuffer(CountedBuffer):
    """A flat buffer over an array of bytes. It copies, and computes nothing."""

    def __init__(self, memory: npt.NDArray[np.uint8], dtype: DType, *, writes: WriteCount | None = None) -> None:
        super().__init__(writes)
        self._memory = memory
        self.numel, self.dtype, self.device = memory.size // dtype.itemsize, dtype, DeviceId("cpu")

    @property
    def raw(self) -> npt.NDArray[np.uint8]:
        return self._memory

    def view(self, offset: int, numel: int) -> BytesBuffer:
        self._check_range(offset, numel)
        size = self.dtype.itemsize
        return BytesBuffer(self._memory[offset * size : (offset + numel) * size], self.dtype, writes=self._writes)

    def copy_from(self, source: Buffer) -> None:
        self._check_source(source)
        if source.dtype is not self.dtype:
            raise ShardingError(f"cannot convert {source!r} to {self!r}", value=source.dtype)
        self.from_bytes(source.to_bytes())

    def fill(self, value: float) -> None:
        if value:
            raise ShardingError(f"{self!r} computes nothing: it can be filled with 0 alone", value=value)
        self._memory.fill(0)
        self.bump_version()

    def data_ptr(self) -> int:
        return self._memory.ctypes.data

    def to_bytes(self) -> bytes:
        return self._memory.tobytes()

    def from_bytes(self, data: bytes | bytearray | memoryview) -> None:
        self._check_nbytes(data)
        self._memory[:] = np.frombuffer(data, np.uint8)
        self.bump_version()


class SourceBuffer(CountedBuffer):
    """Elements that another object holds, for a writer: `read(start, numel)` gives the bytes of some of them."""

    def __init__(self, numel: int, dtype: DType, read: Callable[[int, int], bytes], *, start: int = 0) -> None:
        super().__init__()
        self.numel, self.dtype, self.device = numel, dtype, DeviceId("cpu")
        self._read, self._start = read, start

    @property
    def raw(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.to_bytes(), np.uint8)

    def view(self, offset: int, numel: int) -> SourceBuffer:
        self._check_range(offset, numel)
        return SourceBuffer(numel, self.dtype, self._read, start=self._start + offset)

    def copy_from(self, source: Buffer) -> None:
        raise self._read_only()

    def fill(self, value: float) -> None:
        raise self._read_only()

    def data_ptr(self) -> int:
        return 0

    def to_bytes(self) -> bytes:
        return self._read(self._start, self.numel)

    def from_bytes(self, data: bytes | bytearray | memoryview) -> None:
        raise self._read_only()

    def _read_only(self) -> ShardingError:
        return ShardingError(f"{self!r} is read only", hint="write to the place that it reads from", value=self.numel)


def runs(tensor: TensorEntry) -> Iterator[tuple[int, int]]:
    """Return the tensor's elements as (start, length), cut so that reading run by run reads each piece once."""
    if tensor.is_cut:
        yield 0, tensor.numel
    else:
        yield from ((piece.start, piece.length) for piece in tensor.pieces)


def read(reader: CheckpointReader, tensor: TensorEntry, start: int, length: int) -> npt.NDArray[np.uint8]:
    """The bytes of elements [start, start + length) of the flattened tensor, verified."""
    memory = np.empty(length * tensor.dtype.itemsize, np.uint8)
    reader.read_into(tensor.fqn, tensor.kind, start, length, BytesBuffer(memory, tensor.dtype))
    return memory


def as_numbers(data: npt.NDArray[np.uint8], dtype: DType) -> Array:
    """The elements of `dtype` that the bytes are, in a type of numpy that has all their values."""
    if dtype is DType.BFLOAT16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(dtype.value)


def converted(data: npt.NDArray[np.uint8], source: DType, target: DType) -> npt.NDArray[np.uint8]:
    """Convert bytes to another floating type, rounded to nearest even; overflow becomes infinite."""
    if source is target:
        return data
    if not (source.is_floating and target.is_floating):
        raise CheckpointError(f"{source.value} is not converted to {target.value}", value=target.value)
    numbers = as_numbers(data, source)
    if target is not DType.BFLOAT16:
        with np.errstate(over="ignore"):
            return numbers.astype(target.value).view(np.uint8)
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(numbers.astype(np.float32)).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    not_numbers = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded[not_numbers] = ((bits[not_numbers] >> 16) | 0x0040).astype(np.uint16)
    return rounded.view(np.uint8)
