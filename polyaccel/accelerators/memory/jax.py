"""Buffers on devices that only JAX supports.

[Note: Handles of immutable arrays]
An array of JAX never changes. A buffer is therefore a handle: a write through it computes a new array, gives the old
one up so that its memory can be used again, and lets the handle point to the new one. Views share the handle, so a
write through one is seen by all. `data_ptr` is a number that stands for the handle as long as it lives; the memory
behind it moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyaccel.accelerators.memory.host import ALIGNMENT_NBYTES
from polyaccel.accelerators.memory.numpy import NumpyBuffer
from polyaccel.core.buffer import Buffer, CountedBuffer, WriteCount
from polyaccel.core.types import DeviceId, DType

_handles = count(1)
_PLACE_NBYTES = 1 << 40
"""Between the addresses that stand for two handles; no array is longer."""


class Handle:
    """The array that a buffer and its views share, one-dimensional, and the number that stands for its address."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.place = next(_handles) * _PLACE_NBYTES // ALIGNMENT_NBYTES * ALIGNMENT_NBYTES


class JaxBuffer(CountedBuffer):
    """Elements [offset, offset + numel) of a handle's array. See [Note: Handles of immutable arrays]."""

    def __init__(
        self, handle: Handle, offset: int, numel: int, device: DeviceId, *, writes: WriteCount | None = None
    ) -> None:
        super().__init__(writes)
        self._handle = handle
        self._offset = offset
        self.numel = numel
        self.dtype = DType.parse(handle.array.dtype.name)
        self.device = device

    @property
    def raw(self) -> Any:
        """The elements as they are now."""
        array = self._handle.array
        return array if self._is_whole else _read(array, self._offset, self.numel)

    @property
    def _is_whole(self) -> bool:
        return bool(self.numel == self._handle.array.size)

    def put(self, values: Any) -> None:
        """Overwrite with an array of equal length on the same device, converted to the buffer's type."""
        array = self._handle.array
        values = values.astype(array.dtype)
        self._handle.array = values if self._is_whole else _written(array, values, self._offset)
        self.bump_version()

    def view(self, offset: int, numel: int) -> JaxBuffer:
        self._check_range(offset, numel)
        return JaxBuffer(self._handle, self._offset + offset, numel, self.device, writes=self._writes)

    def copy_from(self, source: Buffer) -> None:
        self._check_source(source)
        if isinstance(source, JaxBuffer):
            values = source.raw
        elif isinstance(source, NumpyBuffer):
            values = np.array(source.raw)  # which may be written to before the device has read it
        else:
            values = np.frombuffer(source.to_bytes(), jnp.dtype(source.dtype.value))
        self.put(jnp.array(jax.device_put(values, self._place)))

    def fill(self, value: float) -> None:
        with jax.default_device(self._place):
            self.put(jnp.full(self.numel, value, self._handle.array.dtype))

    def data_ptr(self) -> int:
        return self._handle.place + self._offset * self.dtype.itemsize

    def to_bytes(self) -> bytes:
        return np.asarray(self.raw).tobytes()

    def from_bytes(self, data: bytes | bytearray | memoryview) -> None:
        self._check_nbytes(data)
        self.put(jax.device_put(np.frombuffer(bytes(data), self._handle.array.dtype), self._place))

    @property
    def _place(self) -> Any:
        (device,) = self._handle.array.devices()
        return device


@partial(jax.jit, static_argnums=2)
def _read(array: Any, offset: Any, numel: int) -> Any:
    return jax.lax.dynamic_slice(array, (offset,), (numel,))


@partial(jax.jit, donate_argnums=0)
def _written(array: Any, values: Any, offset: Any) -> Any:
    return jax.lax.dynamic_update_slice(array, values, (offset,))


def wait_for(arrays: Sequence[Any]) -> None:
    """Wait until each of these arrays has been computed, has failed, or was given up to another computation."""
    try:
        jax.block_until_ready(arrays)
    except Exception:  # of another computation, or donated by another thread meanwhile: those have ended
        for array in arrays:
            with suppress(Exception):
                array.block_until_ready()


def allocate_jax(numel: int, dtype: DType, device: Any, name: DeviceId) -> JaxBuffer:
    """Zeros on a device of JAX."""
    with jax.default_device(device):
        return JaxBuffer(Handle(jnp.zeros(numel, dtype.value)), 0, numel, name)


def import_jax(array: Any, name: DeviceId) -> JaxBuffer:
    """A buffer to read from: the elements of an array of JAX, flattened."""
    return JaxBuffer(Handle(jnp.ravel(array)), 0, array.size, name)
