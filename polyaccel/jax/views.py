"""Parameters in the engine's buffers, seen by JAX without a copy.

[Note: Fence before engine writes]
JAX believes that arrays never change, and computes when it likes. The engine writes updated parameters into the very
memory that JAX reads, so before it writes, every computation that may read it must have ended: `fence` waits for
every live array of this process, the user's own included. A result that no variable holds any more may have any value.
A computation that starts later sees the new values. One thing breaks this, and is looked for elsewhere: a function that
closes over parameters, which become constants of its program (`polyaccel.jax.program.function`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.memory.jax import wait_for
from polyaccel.core.buffer import Buffer
from polyaccel.errors import ShardingError


@dataclass(frozen=True, slots=True)
class CopyCount:
    """How many parameters JAX sees where the engine has them, and how many as copies, made again after each update."""

    views: int
    copies: int

    def __str__(self) -> str:
        return f"zero-copy {self.views}/{self.views + self.copies}"


def fence() -> None:
    """Wait until every computation that was dispatched has ended. See [Note: Fence before engine writes]."""
    wait_for(jax.live_arrays())


class ParamViews:
    """The arrays of all parameters, each imported once; `shapes` by name, in tree order."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)
        self._buffers: dict[str, Buffer] = {}
        self._arrays: dict[str, jax.Array] = {}
        self._copied: dict[str, int] = {}
        """The generation of each parameter that was copied."""

    def bind(self, fqn: str, view: Buffer) -> None:
        """Let the parameter stand in `view` from now on."""
        self._buffers[fqn] = view
        self._import(fqn)

    def arrays(self) -> list[jax.Array]:
        """Return present arrays in tree order; deleted or donated ones are imported again."""
        for fqn, array in self._arrays.items():
            is_stale = fqn in self._copied and self._copied[fqn] != self._buffers[fqn].version
            if is_stale or array.is_deleted():
                self._import(fqn)
        return [self._arrays[fqn] for fqn in self.names()]

    def copied(self, accelerator: Accelerator) -> dict[str, jax.Array]:
        """Copy the parameters, by name."""
        found = {}
        for fqn in self.names():
            source = self._buffers[fqn]
            copy = accelerator.allocate(source.numel, source.dtype)
            copy.copy_from(source)
            found[fqn] = array_over(copy, self._shapes[fqn], f"parameter {fqn!r}")
        accelerator.synchronize()
        return found

    def names(self) -> list[str]:
        """The parameters that are bound, in tree order."""
        return [fqn for fqn in self._shapes if fqn in self._arrays]

    def count(self) -> CopyCount:
        return CopyCount(len(self._arrays) - len(self._copied), len(self._copied))

    def owner_of(self, array: Any) -> str | None:
        """The parameter in whose memory `array`, of JAX or numpy, lies; None for any other."""
        address = address_of(array)
        if address is None:
            return None
        for fqn, buffer in self._buffers.items():
            if buffer.data_ptr() <= address < buffer.data_ptr() + buffer.nbytes:
                return fqn
        return None

    def _import(self, fqn: str) -> None:
        buffer = self._buffers[fqn]
        array = array_over(buffer, self._shapes[fqn], f"parameter {fqn!r}")
        if buffer.numel and array.unsafe_buffer_pointer() != buffer.data_ptr():
            self._copied[fqn] = buffer.version
        self._arrays[fqn] = array


def address_of(array: Any) -> int | None:
    """Return an array's address; None for other objects, empty arrays, several devices."""
    if isinstance(array, jax.Array):
        is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
        if is_key or array.size == 0 or array.is_deleted() or len(array.devices()) != 1:
            return None
        return int(array.addressable_data(0).unsafe_buffer_pointer())
    # JAX wraps constants that are numpy's in its own class, which gives the very array back.
    values = np.asarray(array)
    return int(values.ctypes.data) if values.size and values.dtype != object else None


def array_over(buffer: Buffer, shape: tuple[int, ...], name: str) -> jax.Array:
    """Return a JAX array over `buffer`, or over a copy where it is not aligned to 64 bytes."""
    array = _over(buffer.raw.reshape(shape), name)
    if array.dtype.name != buffer.dtype.value:
        raise ShardingError(
            f"{name} is {buffer.dtype.value} to the engine and {array.dtype.name} to JAX",
            hint='jax.config.update("jax_enable_x64", True), or use types of 32 bits',
            value=buffer.dtype.value,
        )
    return array


def _over(shaped: Any, name: str) -> jax.Array:
    """Return a JAX array over memory of torch or numpy."""
    if isinstance(shaped, np.ndarray):  # which exports no bfloat16 by DLPack
        return jax.device_put(shaped, jax.local_devices(backend="cpu")[0], may_alias=True)
    try:
        return jax.dlpack.from_dlpack(shaped)
    except Exception as error:
        raise ShardingError(
            f"JAX cannot see the engine's memory for {name}: {type(error).__name__}: {error}",
            hint="let JAX and polyaccel use the same device: set JAX_PLATFORMS and DS_ACCELERATOR to the same device",
            value=name,
        ) from error
