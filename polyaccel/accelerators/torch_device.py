"""Base class of accelerators whose memory torch manages. Read first: `TorchAccelerator`, `torch_device_of`.

It works through torch's module of the device (`torch.cuda`, ...). torch is imported when a method needs it, never by
importing this module, so that plugins can be listed and probed in a process without torch.

By torch's documentation of accelerators, the module of a device has: device_count, current_device, set_device,
synchronize, Stream, Event, stream, current_stream, get_rng_state, set_rng_state, memory_allocated,
max_memory_allocated, memory_reserved, reset_peak_memory_stats and mem_get_info. An accelerator whose module lacks one
of them overrides the method here that calls it.
"""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from polyaccel.accelerators.base import Accelerator, Event, MemoryStats, Stream
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DeviceId, DType
from polyaccel.errors import PluginContractError, ShardingError
from polyaccel.ops.base import KernelTable

if TYPE_CHECKING:
    import torch

_LENGTH = struct.Struct("<Q")


class TorchEvent(Event):
    """A point in a torch stream.

    Args:
        event: torch's event of the device.
    """

    def __init__(self, event: Any) -> None:
        self.raw = event

    def synchronize(self) -> None:
        self.raw.synchronize()

    def is_reached(self) -> bool:
        return bool(self.raw.query())

    def elapsed_ms(self, later: Event) -> float:
        if not isinstance(later, TorchEvent):
            raise PluginContractError("events of different devices cannot be compared", value=later)
        return float(self.raw.elapsed_time(later.raw))


class TorchStream(Stream):
    """A torch stream, and the device module that it is from.

    Args:
        module: torch's module of the device, such as `torch.cuda`.
        stream: torch's stream of the device.
    """

    def __init__(self, module: Any, stream: Any) -> None:
        self._module = module
        self.raw = stream

    def record(self) -> Event:
        event = self._module.Event(enable_timing=True)
        event.record(self.raw)
        return TorchEvent(event)

    def wait(self, event: Event) -> None:
        if not isinstance(event, TorchEvent):
            raise PluginContractError("a stream cannot wait for an event of another device", value=event)
        self.raw.wait_event(event.raw)

    def synchronize(self) -> None:
        self.raw.synchronize()

    def use(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(self.raw)
        return context


class TorchAccelerator(Accelerator):
    """A device whose memory torch manages. Subclasses state `torch_device_type`, `probe` and `capabilities`."""

    torch_device_type: ClassVar[str]
    extension: ClassVar[str | None] = None
    """Package that adds this device to torch; None when torch has it."""

    @property
    def _torch(self) -> Any:
        if self.extension is not None:
            import_module(self.extension)
        return import_module("torch")

    @property
    def _module(self) -> Any:
        """torch's module of this device: `torch.cuda`, `torch.xpu`, ..."""
        return self._torch.get_device_module(self.torch_device_type)

    def _torch_device(self) -> torch.device:
        device: torch.device = self._torch.device(self.torch_device_type, self.current_device().index or 0)
        return device

    def kernels(self) -> KernelTable:
        from polyaccel.ops.torch.kernels import torch_kernels

        return torch_kernels()

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        from polyaccel.accelerators.memory.torch import allocate_torch

        if pinned and not self.capabilities().host_pinning:
            return allocate_torch(numel, dtype, self._torch.device("cpu"))
        return allocate_torch(numel, dtype, self._torch_device(), pinned=pinned)

    def wrap(self, array: Any) -> Buffer:
        from polyaccel.accelerators.memory.torch import wrap_torch

        return wrap_torch(array)

    def import_array(self, array: Any) -> Buffer:
        from polyaccel.accelerators.memory.torch import import_torch

        return import_torch(array)

    def device_count(self) -> int:
        return int(self._module.device_count())

    def current_device(self) -> DeviceId:
        return DeviceId(self.torch_device_type, int(self._module.current_device()))

    def set_device(self, index: int) -> None:
        count = self.device_count()
        if not 0 <= index < count:
            raise ShardingError(
                f"{self.name}:{index} does not exist, this process sees {count}",
                hint=f"start at most {count} ranks here, or show more devices by {self.visible_devices_variable}",
                value=index,
            )
        self._module.set_device(index)

    def synchronize(self) -> None:
        self._module.synchronize()

    def memory_stats(self) -> MemoryStats:
        module = self._module
        free_nbytes, total_nbytes = module.mem_get_info()
        return MemoryStats(
            allocated_nbytes=int(module.memory_allocated()),
            peak_nbytes=int(module.max_memory_allocated()),
            reserved_nbytes=int(module.memory_reserved()),
            total_nbytes=int(total_nbytes),
            free_nbytes=int(free_nbytes),
        )

    def reset_peak_memory(self) -> None:
        self._module.reset_peak_memory_stats()

    def manual_seed(self, seed: int) -> None:
        self._torch.manual_seed(seed)  # the host's generator, and those of every device

    def rng_state(self) -> bytes:
        """Return the states of the host's generator, from which data loaders draw, and of the current device's."""
        host: bytes = self._torch.get_rng_state().numpy().tobytes()
        return _LENGTH.pack(len(host)) + host + self._generator_state()

    def set_rng_state(self, state: bytes) -> None:
        """Restore both generators.

        Args:
            state: Bytes from `rng_state`.

        Raises:
            ShardingError: Another kind of device saved the state.
        """
        before = self._torch.get_rng_state()
        try:
            (length,) = _LENGTH.unpack_from(state)
            host, device = state[_LENGTH.size : _LENGTH.size + length], state[_LENGTH.size + length :]
            self._torch.set_rng_state(self._bytes_tensor(host))
            self._set_generator_state(device)
        except (AttributeError, RuntimeError, TypeError, ValueError, struct.error) as error:
            self._torch.set_rng_state(before)
            raise ShardingError(
                f"{len(state)} bytes are no random state of {self.name}: {error}",
                hint="restore a state with the accelerator that saved it",
                value=len(state),
            ) from error

    def _generator_state(self) -> bytes:
        state: bytes = self._module.get_rng_state().cpu().numpy().tobytes()
        return state

    def _set_generator_state(self, state: bytes) -> None:
        self._module.set_rng_state(self._bytes_tensor(state))

    def _bytes_tensor(self, data: bytes) -> Any:
        if not data:
            raise ValueError("a generator's state is missing")
        return self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)

    def new_stream(self) -> Stream:
        module = self._module
        return TorchStream(module, module.Stream())

    def current_stream(self) -> Stream:
        module = self._module
        return TorchStream(module, module.current_stream())


def require_torch_memory(accelerator: Accelerator) -> None:
    """Refuse an accelerator with a torch device whose buffers are not over tensors.

    Args:
        accelerator: Accelerator to check. One element is allocated.

    Raises:
        PluginContractError: `raw` of its buffers is not a tensor.
    """
    import torch

    raw = accelerator.allocate(1, DType.FLOAT32).raw
    if not isinstance(raw, torch.Tensor):
        raise PluginContractError(
            f"torch cannot see the memory of accelerator {accelerator.name!r}: `raw` of its buffers is a "
            f"{type(raw).__module__}.{type(raw).__qualname__}",
            hint="allocate buffers over tensors (`TorchBuffer`), or state `torch_device_type = None`: modules train in "
            "no memory that torch does not see",
            value=type(raw).__qualname__,
        )


def torch_device_of(accelerator: Accelerator) -> torch.device:
    """Return the torch device that modules live on.

    Args:
        accelerator: Accelerator whose current device is meant.

    Returns:
        The device, with its index where devices have one.

    Raises:
        PluginContractError: torch does not support the accelerator's device.
    """
    if accelerator.torch_device_type is None:
        raise PluginContractError(
            f"accelerator {accelerator.name!r} has no torch device", hint="choose one that torch knows, such as cpu"
        )
    import torch

    index = accelerator.current_device().index
    kind = accelerator.torch_device_type
    return torch.device(kind) if index is None else torch.device(kind, index)
