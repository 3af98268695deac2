"""Base class of accelerators whose memory is JAX's own: `JaxAccelerator`.

Functions of JAX train on it in native mode; modules of torch cannot. Buffers are handles to JAX's arrays
(`polyaccel.accelerators.memory.jax`). Other abilities that it lacks are listed in its notes, as far as trying them
shows. JAX is imported when a method needs it, never by importing this module, so that plugins can be listed and probed
in a process without it.
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np

from polyaccel.accelerators import device_probe
from polyaccel.accelerators.base import Accelerator, Capabilities, DeviceQueue, MemoryStats, Stream
from polyaccel.accelerators.memory.numpy import allocate_numpy
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DeviceId, DType
from polyaccel.errors import PluginContractError, ShardingError
from polyaccel.ops.base import KernelTable

_STATE = b"polyaccel jax seed "


class JaxAccelerator(Accelerator):
    """A platform of JAX. Subclasses state `jax_platform` and `probe`."""

    torch_device_type: ClassVar[str | None] = None
    jax_platform: ClassVar[str]

    def __init__(self) -> None:
        self._index = 0
        self._seed = 0

    @property
    def _jax(self) -> Any:
        return import_module("jax")

    @property
    def _devices(self) -> Any:
        return self._jax.local_devices(backend=self.jax_platform)

    @property
    def _device(self) -> Any:
        return self._devices[self._index]

    def capabilities(self) -> Capabilities:
        return self._capabilities

    @cached_property
    def _capabilities(self) -> Capabilities:
        lacks = {
            "arrays never change: train functions of JAX in native mode; no module of torch": True,
            "quantises nothing": True,
            "no numbers on memory: they are 0": not self._device.memory_stats(),
            "no generator: only a seed is saved": True,
            "no collectives outside programs of JAX: they go by the host": True,
        }
        return Capabilities(
            dtypes=frozenset(dtype for dtype in DType if self._computes(dtype)),
            default_comm="gloo" if find_spec("torch") else "local",
            mutable_buffers=False,
            notes=tuple(note for note, lacking in lacks.items() if lacking),
        )

    def _computes(self, dtype: DType) -> bool:
        def add() -> bool:
            ones = self.allocate(2, dtype)
            ones.fill(1)
            total = ones.raw if dtype is DType.BOOL else ones.raw + ones.raw
            return bool((np.asarray(total) == (1 if dtype is DType.BOOL else 2)).all())

        return self._jax.dtypes.canonicalize_dtype(dtype.value).name == dtype.value and device_probe.works(add)

    def kernels(self) -> KernelTable:
        from polyaccel.ops.jax import jax_kernels

        return jax_kernels()

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        if pinned:
            return allocate_numpy(numel, dtype)
        from polyaccel.accelerators.memory.jax import allocate_jax

        return allocate_jax(numel, dtype, self._device, self.current_device())

    def import_array(self, array: Any) -> Buffer:
        from polyaccel.accelerators.memory.jax import import_jax

        if not isinstance(array, self._jax.Array):
            kind = f"{type(array).__module__}.{type(array).__qualname__}"
            raise PluginContractError(f"accelerator {self.name!r} imports arrays of JAX, not a {kind}", value=kind)
        return import_jax(array, self.current_device())

    def device_count(self) -> int:
        return len(self._devices)

    def current_device(self) -> DeviceId:
        return DeviceId(self.name, self._index)

    def set_device(self, index: int) -> None:
        count = self.device_count()
        if not 0 <= index < count:
            raise ShardingError(
                f"{self.name}:{index} does not exist, this process sees {count}",
                hint=f"start at most {count} ranks here",
                value=index,
            )
        self._index = index

    def synchronize(self) -> None:
        from polyaccel.accelerators.memory.jax import wait_for

        wait_for(self._jax.live_arrays(self.jax_platform))

    def memory_stats(self) -> MemoryStats:
        numbers = self._device.memory_stats() or {}
        used, total = int(numbers.get("bytes_in_use", 0)), int(numbers.get("bytes_limit", 0))
        return MemoryStats(
            allocated_nbytes=used,
            peak_nbytes=int(numbers.get("peak_bytes_in_use", used)),
            reserved_nbytes=int(numbers.get("bytes_reserved", used)),
            total_nbytes=total,
            free_nbytes=max(0, total - used),
        )

    def reset_peak_memory(self) -> None:
        """Does nothing: JAX counts from the start of the process."""

    def manual_seed(self, seed: int) -> None:
        """Keep the seed for `rng_state`. It seeds no generator: functions of JAX receive their keys.

        Args:
            seed: The seed.
        """
        self._seed = seed

    def rng_state(self) -> bytes:
        return _STATE + str(self._seed).encode()

    def set_rng_state(self, state: bytes) -> None:
        """Restore the seed.

        Args:
            state: Bytes from `rng_state`.

        Raises:
            ShardingError: Another kind of device saved the state.
        """
        if not state.startswith(_STATE):
            raise ShardingError(
                f"{len(state)} bytes are no random state of {self.name}",
                hint="restore a state with the accelerator that saved it",
                value=len(state),
            )
        self._seed = int(state.removeprefix(_STATE))

    def new_stream(self) -> Stream:
        return DeviceQueue(self.synchronize)

    def current_stream(self) -> Stream:
        return DeviceQueue(self.synchronize)
