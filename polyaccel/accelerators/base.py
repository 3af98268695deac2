"""The contract of an accelerator plugin. Read first: `Accelerator`, `Capabilities`.

An accelerator is one kind of device as seen by one process. It has few abstract methods; everything else has a default
here, so a method added later breaks no plugin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DeviceId, DType
from polyaccel.core.types import Probe as Probe  # every kind of plugin answers a probe
from polyaccel.errors import PluginContractError
from polyaccel.ops.base import KernelTable
from polyaccel.ops.matmul_autotune import MatrixChoice


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of a device, asked when the engine is composed and never inside a step.

    Attributes:
        dtypes: Element types that the device computes with.
        default_comm: Comm backend to use when neither config nor environment names one.
        streams: Work queued on different streams overlaps.
        mutable_buffers: Kernels write in place. False for PJRT devices.
        host_pinning: `allocate(pinned=True)` returns memory that copies asynchronously.
        symmetric_memory: Peers can map every rank's buffers.
        graphs: `record_work` records queued work, which the device plays without launching it piece by piece.
        notes: Sentences for people about abilities that the device lacks.
    """

    dtypes: frozenset[DType]
    default_comm: str
    streams: bool = False
    mutable_buffers: bool = True
    host_pinning: bool = False
    symmetric_memory: bool = False
    graphs: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Device memory of this process, in bytes. All are 0 where the device does not count.

    Attributes:
        allocated_nbytes: Memory of live tensors; on the host, resident bytes of the process.
        peak_nbytes: Largest `allocated_nbytes` since the last `reset_peak_memory`.
        reserved_nbytes: Memory that the allocator holds, free blocks included.
        total_nbytes: Memory of the device.
        free_nbytes: Memory of the device that is not in use.
    """

    allocated_nbytes: int
    peak_nbytes: int
    reserved_nbytes: int
    total_nbytes: int
    free_nbytes: int


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the point is reached."""

    @abstractmethod
    def is_reached(self) -> bool:
        """Return whether the point is reached. Does not block."""

    @abstractmethod
    def elapsed_ms(self, later: Event) -> float:
        """Measure the time from this point to a later one. Both must be reached.

        Args:
            later: Point of a stream of the same device.

        Returns:
            Milliseconds.
        """


class Stream(ABC):
    """A queue of device work. On synchronous devices it is a null stream, so that callers never branch."""

    @abstractmethod
    def record(self) -> Event:
        """Return an event at the present end of the queue."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let later work in this queue wait for an event. The host does not block.

        Args:
            event: Point of a stream of the same device.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the queue is empty."""

    def use(self) -> AbstractContextManager[Any]:
        """Return a context whose `with` block queues its work on this stream."""
        return nullcontext()


class Accelerator(ABC):
    """One kind of device. Constructing it must be cheap and must not initialise the device."""

    API_VERSION: ClassVar[tuple[int, int]] = (3, 2)
    """Version of this contract. Plugins state the one they were written for; majors must agree."""
    name: ClassVar[str]
    """The entry point's name, which is also the value of `DS_ACCELERATOR`."""
    torch_device_type: ClassVar[str | None] = None
    """The type part of the `torch.device` that modules live on; None when torch does not support it."""
    jax_platform: ClassVar[str | None] = None
    """JAX's platform of the device; None where it is the accelerator's own name, or JAX does not support the device."""
    visible_devices_variable: ClassVar[str | None] = None
    """The environment variable that hides devices from a process, such as CUDA_VISIBLE_DEVICES."""
    exported_variables: ClassVar[tuple[str, ...]] = ()
    """Prefixes of environment variables that a launcher passes on to other hosts."""

    # What a plugin must provide: 15 methods.

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Return whether a device is present. Initialises nothing; imports torch or JAX only if they are loaded
        already."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return the abilities of the device."""

    @abstractmethod
    def kernels(self) -> KernelTable:
        """Return a table with a kernel for every op of `ALL_OPS`. Kernels that quantise may be missing where
        `mutable_buffers` is False."""

    @abstractmethod
    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        """Allocate zero-filled memory on the current device. Its address stays the same.

        Args:
            numel: Elements of the buffer. 0 is allowed.
            dtype: Element type.
            pinned: Allocate host memory that the device copies from and to asynchronously. It is plain host memory
                where `host_pinning` is not claimed.

        Returns:
            A buffer that starts on a 64-byte boundary. The caller owns it; the memory is freed with the last reference.

        Raises:
            MemoryError: There is no room. The framework's own error is allowed too (torch.OutOfMemoryError, XLA's
                RESOURCE_EXHAUSTED). The device works on after it.
        """

    @abstractmethod
    def device_count(self) -> int:
        """Return the number of devices of this kind that the process sees."""

    @abstractmethod
    def current_device(self) -> DeviceId:
        """Return the device that this process works on."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Select the device that this process works on from now on. Does nothing where devices have no index.

        Args:
            index: Number among the devices that the process sees, from 0.

        Raises:
            ShardingError: The device does not exist.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until everything queued on the current device has run."""

    @abstractmethod
    def memory_stats(self) -> MemoryStats:
        """Return the memory figures of the current device."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Restart `peak_nbytes` at the memory now allocated."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generators of every device of this process.

        Args:
            seed: The seed. Equal seeds give equal `rng_state`.
        """

    @abstractmethod
    def rng_state(self) -> bytes:
        """Read the generators from which this process draws, without drawing.

        Returns:
            State for `set_rng_state`: that of the current device, and of the host, from which data loaders draw. Equal
            states are equal bytes.
        """

    @abstractmethod
    def set_rng_state(self, state: bytes) -> None:
        """Restore the generators, which then draw what they drew after `rng_state`.

        Args:
            state: Bytes from `rng_state` of the same kind of accelerator.

        Raises:
            ShardingError: The bytes are not a state of this accelerator. The generators stay as they were.
        """

    @abstractmethod
    def new_stream(self) -> Stream:
        """Return a new stream of the current device."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream on which this thread queues its work."""

    # What has a default.

    def wrap(self, array: Any) -> Buffer:
        """Make a buffer over the memory of a framework's array, without a copy.

        Args:
            array: Contiguous array of any shape, on this device.

        Returns:
            A flat view, which keeps the array's memory alive.

        Raises:
            PluginContractError: The accelerator does not support this kind of array. The default raises it always.
            ShardingError: The array is not contiguous.
        """
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        hint = (
            "give it a `wrap` that knows this array, or a `torch_device_type` of None if torch does not see its memory"
        )
        raise PluginContractError(f"accelerator {self.name!r} cannot wrap a {kind}", hint=hint, value=kind)

    def import_array(self, array: Any) -> Buffer:
        """Make a buffer to read from over another framework's array on this device, by DLPack.

        Args:
            array: Contiguous array of any shape.

        Returns:
            A flat view, which keeps the array's memory alive. The caller only reads it.

        Raises:
            PluginContractError: The device's memory has no such exchange. The default raises it always.
        """
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise PluginContractError(f"accelerator {self.name!r} cannot import a {kind}", value=kind)

    def from_host_memory(self, memory: Any, dtype: DType) -> Buffer:
        """Make a buffer over host memory that another library or process has made.

        Args:
            memory: Writable one-dimensional numpy array of uint8. The buffer keeps it alive.
            dtype: Element type of the buffer.

        Returns:
            A buffer over the same bytes.

        Raises:
            PluginContractError: The device cannot work on host memory. The default raises it always.
        """
        raise PluginContractError(f"accelerator {self.name!r} does not work on host memory", value=dtype)

    @property
    def works_on_host_memory(self) -> bool:
        """Whether `from_host_memory` is provided: ranks on one host can then share memory."""
        return type(self).from_host_memory is not Accelerator.from_host_memory

    def matrix_kernels(self, choice: MatrixChoice) -> KernelTable:
        """Select kernels that replace the framework's own float32 matrix products.

        Args:
            choice: "on": every kernel of `MATRIX_OPS` that the device has. "auto": those that are at least
                `LEAST_SPEEDUP` times as fast on this machine, which may be measured first, in less than half a second.
                "off": none.

        Returns:
            A table, often empty. Except for "off" it also holds `GROUPED_OPS`, all or none, with which experts compute.
        """
        return KernelTable(self.name, {})

    def decode_kernels(self) -> KernelTable:
        """Return kernels of `DECODE_OPS` by which generation decodes; the framework computes what is not among them."""
        return KernelTable(self.name, {})

    def record_work(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the work that a function queues on the device, without running it.

        A recording has addresses and numbers as they are now, so what changes between plays is read from memory of the
        device. The host cannot wait for the device inside, and memory that is allocated there belongs to the recording.

        Args:
            work: Queues kernels and copies on the current stream, and on others that wait for it. Called once.

        Returns:
            A function that queues the recorded work on the current stream, as often as it is called. The caller keeps
            the memory that the work reads and writes.

        Raises:
            PluginContractError: `graphs` is not claimed. The default raises it always.
        """
        raise PluginContractError(
            f"accelerator {self.name!r} records no work", hint='leave "graphs" out of the config', value=self.name
        )

    def supported_dtypes(self) -> frozenset[DType]:
        """Return the element types that the device computes with."""
        return self.capabilities().dtypes

    def close(self) -> None:  # noqa: B027 - most accelerators hold nothing
        """Release the resources of the accelerator. The process may continue without it."""

    # The names that DeepSpeed's users call on `get_accelerator()`.

    def device_name(self, index: int | None = None) -> str:
        """Name a device for `tensor.to(...)`.

        Args:
            index: Number of the device; None names the kind alone.

        Returns:
            A name such as `cuda:1`. It begins with the accelerator's own name where torch lacks the device.
        """
        return str(DeviceId(self.torch_device_type or self.name, index))

    def is_available(self) -> bool:
        """Return whether `probe` finds a usable device."""
        return self.probe().usable

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes with bfloat16."""
        return DType.BFLOAT16 in self.supported_dtypes()

    def is_fp16_supported(self) -> bool:
        """Return whether the device computes with float16."""
        return DType.FLOAT16 in self.supported_dtypes()

    def communication_backend_name(self) -> str:
        """Return the name of the default comm backend."""
        return self.capabilities().default_comm

    def memory_allocated(self) -> int:
        """Return the bytes allocated on the current device."""
        return self.memory_stats().allocated_nbytes

    def max_memory_allocated(self) -> int:
        """Return the most bytes allocated since the last `reset_peak_memory`."""
        return self.memory_stats().peak_nbytes

    def total_memory(self) -> int:
        """Return the bytes of memory of the current device."""
        return self.memory_stats().total_nbytes

    def available_memory(self) -> int:
        """Return the bytes of the current device's memory that are not in use."""
        return self.memory_stats().free_nbytes


@dataclass(frozen=True)
class NullEvent(Event):
    """The event of a synchronous device: already reached.

    Attributes:
        at_s: Host time in seconds, by `perf_counter`, from which `elapsed_ms` is computed.
    """

    at_s: float = 0.0

    def synchronize(self) -> None:
        return None

    def is_reached(self) -> bool:
        return True

    def elapsed_ms(self, later: Event) -> float:
        if not isinstance(later, NullEvent):
            raise PluginContractError("events of different devices cannot be compared", value=later)
        return (later.at_s - self.at_s) * 1e3


@dataclass(frozen=True)
class NullStream(Stream):
    """The stream of a synchronous device: everything queued on it has run already."""

    def record(self) -> Event:
        return NullEvent(perf_counter())

    def wait(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        return None


class DeviceQueue(Stream):
    """The only queue of a device without streams: waiting for a part of its work is waiting for all of it.

    Args:
        synchronize: Blocks the host until the device has run everything.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize

    def record(self) -> Event:
        self._synchronize()
        return NullEvent(perf_counter())

    def wait(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        self._synchronize()


def frameworks_of(kind: type[Accelerator]) -> tuple[str, ...]:
    """List the frameworks whose models train on a kind of device.

    Args:
        kind: Class of the accelerator; it is not constructed.

    Returns:
        "torch" where torch has a device for it (`torch_device_type`). "jax" where JAX has one (`jax_platform`) or its
        arrays can be read there (`import_array`).
    """
    torch = kind.torch_device_type is not None
    jax = kind.jax_platform is not None or kind.import_array is not Accelerator.import_array
    return tuple(name for name, trains in (("torch", torch), ("jax", jax)) if trains)


def describe(capabilities: Capabilities) -> Mapping[str, str]:
    """Show capabilities as short strings, for tables and reports.

    Args:
        capabilities: Abilities of a device.

    Returns:
        The flags as "yes" or "no", the element types and the default comm backend, by their labels.
    """
    flags = ("streams", "mutable_buffers", "host_pinning", "symmetric_memory", "graphs")
    yes = {flag: "yes" if getattr(capabilities, flag) else "no" for flag in flags}
    dtypes = ", ".join(sorted(dtype.value for dtype in capabilities.dtypes))
    return {"dtypes": dtypes, "default comm": capabilities.default_comm, **yes}
