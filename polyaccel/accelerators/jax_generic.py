"""Any device that JAX knows and torch does not, without a plugin of ours: `device_plugin("name")`.

Packages teach JAX a platform by the namespace package or the entry-point group `jax_plugins`. Such a device's memory is
JAX's own, and buffers are handles to its arrays (`polyaccel.accelerators.memory.jax`). Functions of JAX train on it in
native mode; modules of torch cannot. Other abilities that it lacks are listed in its notes, as far as trying them
tells.
"""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec
from typing import Any, ClassVar

import jax
import numpy as np

from polyaccel.accelerators import presence
from polyaccel.accelerators.base import Accelerator, Capabilities, DeviceQueue, MemoryStats, Probe, Stream
from polyaccel.accelerators.memory.jax import JaxBuffer, allocate_jax, import_jax, wait_for
from polyaccel.accelerators.memory.numpy import allocate_numpy
from polyaccel.buffer import Buffer
from polyaccel.errors import PluginContractError, ShardingError
from polyaccel.ops.base import KernelTable
from polyaccel.ops.jax.kernels import jax_kernels
from polyaccel.types import DeviceId, DType

_STATE = b"polyaccel jax seed "


def device_plugin(platform: str) -> type[JaxAccelerator] | None:
    """The accelerator for JAX's devices of this platform; None if JAX has none."""
    try:
        jax.local_devices(backend=platform)
    except (RuntimeError, AssertionError):  # not a platform of this installation, or one that does not start
        return None
    return type(JaxAccelerator.__name__, (JaxAccelerator,), {"name": platform, "__module__": __name__})


class JaxAccelerator(Accelerator):
    """A platform of JAX that no plugin is for. `device_plugin` makes the classes."""

    API_VERSION: ClassVar[tuple[int, int]] = (2, 0)
    torch_device_type: ClassVar[str | None] = None

    def __init__(self) -> None:
        self._index = 0
        self._seed = 0

    @classmethod
    def probe(cls) -> Probe:
        count = len(jax.local_devices(backend=cls.name))
        found = f"jax {jax.__version__} sees {count} {cls.name} device{'s' if count > 1 else ''}"
        return presence.usable(f"{found}; no plugin is for it")

    @property
    def _device(self) -> Any:
        return jax.local_devices(backend=self.name)[self._index]

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

        return jax.dtypes.canonicalize_dtype(dtype.value).name == dtype.value and presence.works(add)

    def kernels(self) -> KernelTable:
        return jax_kernels()

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        return (
            allocate_numpy(numel, dtype) if pinned else allocate_jax(numel, dtype, self._device, self.current_device())
        )

    def import_array(self, array: Any) -> JaxBuffer:
        if not isinstance(array, jax.Array):
            kind = f"{type(array).__module__}.{type(array).__qualname__}"
            raise PluginContractError(f"accelerator {self.name!r} imports arrays of JAX, not a {kind}", value=kind)
        return import_jax(array, self.current_device())

    def device_count(self) -> int:
        return len(jax.local_devices(backend=self.name))

    def current_device(self) -> DeviceId:
        return DeviceId(self.name, self._index)

    def set_device(self, index: int) -> None:
        count = self.device_count()
        if not 0 <= index < count:
            raise ShardingError(
                f"{self.name}:{index} does not exist, this process sees {count}",
                cure=f"start at most {count} ranks here",
                value=index,
            )
        self._index = index

    def synchronize(self) -> None:
        wait_for(jax.live_arrays(self.name))

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
        """Keep the seed for `rng_state`. It seeds no generator, because functions of JAX are given their keys."""
        self._seed = seed

    def rng_state(self) -> bytes:
        return _STATE + str(self._seed).encode()

    def set_rng_state(self, state: bytes) -> None:
        """Raises ShardingError for a state that another kind of device saved."""
        if not state.startswith(_STATE):
            raise ShardingError(
                f"{len(state)} bytes are no random state of {self.name}",
                cure="restore a state with the accelerator that saved it",
                value=len(state),
            )
        self._seed = int(state.removeprefix(_STATE))

    def new_stream(self) -> Stream:
        return DeviceQueue(self.synchronize)

    def current_stream(self) -> Stream:
        return DeviceQueue(self.synchronize)
