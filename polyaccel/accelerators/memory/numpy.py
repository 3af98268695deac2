"""Buffers whose memory is a numpy array: the host without torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.accelerators.memory.host import aligned_shift, spare_nbytes
from polyaccel.core.buffer import Buffer, CountedBuffer, WriteCount
from polyaccel.core.types import DeviceId, DType
from polyaccel.errors import PluginContractError, ShardingError

Array = npt.NDArray[Any]


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return numpy's element type.

    Args:
        dtype: Element type.

    Returns:
        numpy's type; that of ml_dtypes for bfloat16.

    Raises:
        ShardingError: The type is bfloat16 and ml_dtypes is not installed.
    """
    if dtype is not DType.BFLOAT16:
        plain: np.dtype[Any] = np.dtype(dtype.value)
        return plain
    try:
        added: np.dtype[Any] = np.dtype(import_module("ml_dtypes").bfloat16)
        return added
    except ImportError:
        raise ShardingError(
            "numpy has no bfloat16",
            hint="install ml_dtypes, whose type numpy takes, or use float32 or float16",
            value=dtype.value,
        ) from None


class NumpyBuffer(CountedBuffer):
    """A flat buffer over a one-dimensional contiguous array in host memory.

    Args:
        array: Shape (numel,), contiguous. The buffer keeps it alive and shares its memory.
        writes: See `CountedBuffer`.

    Raises:
        ShardingError: The array has another shape or is not contiguous.
    """

    def __init__(self, array: Array, *, writes: WriteCount | None = None) -> None:
        if array.ndim != 1 or not array.flags.c_contiguous:
            raise ShardingError(f"a buffer is flat and contiguous, not of shape {array.shape}", value=array.shape)
        super().__init__(writes)
        self._array = array
        self.numel = array.size
        self.dtype = DType.parse(array.dtype.name)
        self.device = DeviceId("cpu")

    @property
    def raw(self) -> Array:
        return self._array

    def view(self, offset: int, numel: int) -> NumpyBuffer:
        self._check_range(offset, numel)
        return NumpyBuffer(self._array[offset : offset + numel], writes=self._writes)

    def copy_from(self, source: Buffer) -> None:
        self._check_source(source)
        self._array[:] = source.raw if isinstance(source, NumpyBuffer) else _import_foreign(source)
        self.bump_version()

    def fill(self, value: float) -> None:
        self._array.fill(value)
        self.bump_version()

    def data_ptr(self) -> int:
        return self._array.ctypes.data

    def to_bytes(self) -> bytes:
        return self._array.tobytes()

    def copy_to_host(self, target: memoryview) -> None:
        np.frombuffer(target, np.uint8)[:] = self._array.view(np.uint8)

    def from_bytes(self, data: bytes | bytearray | memoryview) -> None:
        self._check_nbytes(data)
        self._array.view(np.uint8)[:] = np.frombuffer(data, dtype=np.uint8)
        self.bump_version()


def _import_foreign(source: Buffer) -> Array:
    """An array with the contents of another framework's buffer; bfloat16 widens to float32 exactly, by its bits."""
    data = source.to_bytes()
    if source.dtype is DType.BFLOAT16:
        return (np.frombuffer(data, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype=numpy_dtype(source.dtype))


def allocate_numpy(numel: int, dtype: DType) -> NumpyBuffer:
    """Allocate zero-filled host memory on a 64-byte boundary.

    Args:
        numel: Elements of the buffer.
        dtype: Element type.

    Returns:
        A buffer over new memory.
    """
    theirs = numpy_dtype(dtype)
    nbytes = numel * theirs.itemsize
    room = np.zeros(nbytes + spare_nbytes(nbytes), dtype=np.uint8)
    shift = aligned_shift(room.ctypes.data, nbytes)
    return NumpyBuffer(room[shift : shift + nbytes].view(theirs))


def numpy_over(memory: npt.NDArray[np.uint8], dtype: DType) -> NumpyBuffer:
    """Make a buffer over the bytes of an array.

    Args:
        memory: Shape (nbytes,), uint8. The buffer keeps it alive.
        dtype: Element type of the buffer.

    Returns:
        A buffer over the same memory.
    """
    return NumpyBuffer(memory.view(numpy_dtype(dtype)))


def import_numpy(array: object) -> NumpyBuffer:
    """Make a buffer to read from over an array.

    Args:
        array: Array of any shape that numpy can convert.

    Returns:
        A flat view where numpy can see the memory and it is contiguous, else a copy.
    """
    return NumpyBuffer(np.ascontiguousarray(array).reshape(-1))


def wrap_numpy(array: object) -> NumpyBuffer:
    """Make a flat buffer over the memory of an array.

    Args:
        array: numpy array of any shape, contiguous and writable. The buffer keeps it alive.

    Returns:
        A flat view.

    Raises:
        PluginContractError: It is not a numpy array.
        ShardingError: It is not contiguous or is read-only.
    """
    if not isinstance(array, np.ndarray):
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise PluginContractError(
            f"the cpu accelerator with numpy memory cannot wrap a {kind}", hint="pass a numpy.ndarray", value=kind
        )
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ShardingError(
            f"an array of shape {array.shape} and strides {array.strides} is not contiguous and writable",
            hint="pass numpy.ascontiguousarray(array).copy()",
            value=array.strides,
        )
    return NumpyBuffer(array.reshape(-1))
