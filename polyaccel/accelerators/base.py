"""The contract of an accelerator plugin: `Accelerator`, and the small values that it hands out.

An accelerator is one kind of device as seen by one process. It has few abstract methods; everything else has a default
here, so a method added later breaks no plugin. The abilities of a device are the fields of `Capabilities`, which are
asked when the engine is composed and never inside a step.
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
    """The abilities of a device. `default_comm` names the comm backend to use when neither config nor environment does.

    `streams`: work queued on different streams overlaps. `mutable_buffers`: kernels write in place (False for PJRT
    devices). `host_pinning`: `allocate(pinned=True)` gives memory that copies asynchronously. `symmetric_memory`: every
    rank's buffers can be mapped by its peers. `dtypes`: element types it computes with. `notes`: sentences for people
    about abilities that the device lacks.
    """

    dtypes: frozenset[DType]
    default_comm: str
    streams: bool = False
    mutable_buffers: bool = True
    host_pinning: bool = False
    symmetric_memory: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Device memory of this process, in bytes; all 0 where nobody counts. `peak_nbytes` counts from the last
    `reset_peak_memory`."""

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
    def is_reached(self) -> bool: ...

    @abstractmethod
    def elapsed_ms(self, later: Event) -> float:
        """Milliseconds from this point to `later`, both reached."""


class Stream(ABC):
    """A queue of device work. On synchronous devices it is a null stream, so that callers never branch."""

    @abstractmethod
    def record(self) -> Event:
        """Mark the present end of the queue."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let later work in this queue wait for `event`; the host does not block."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the queue is empty."""

    def use(self) -> AbstractContextManager[Any]:
        """Queue the work of a `with` block on this stream."""
        return nullcontext()


class Accelerator(ABC):
    """One kind of device. Constructing it must be cheap and must not initialise the device."""

    API_VERSION: ClassVar[tuple[int, int]] = (3, 0)
    """Version of this contract. Plugins state the one they were written for; majors must agree."""
    name: ClassVar[str]
    """The entry point's name, which is also the value of `DS_ACCELERATOR`."""
    torch_device_type: ClassVar[str | None] = None
    """The type part of the `torch.device` that modules live on; None when torch does not know the device."""
    jax_platform: ClassVar[str | None] = None
    """The platform by which JAX knows the device; None where that is the accelerator's own name, or JAX does not."""
    visible_devices_variable: ClassVar[str | None] = None
    """The environment variable that hides devices from a process, such as CUDA_VISIBLE_DEVICES."""
    exported_variables: ClassVar[tuple[str, ...]] = ()
    """Prefixes of environment variables that a launcher passes on to other hosts."""

    # What a plugin must provide: 15 methods.

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Whether a device is present. Initialises nothing; imports torch or JAX only if they are loaded already."""

    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abstractmethod
    def kernels(self) -> KernelTable:
        """A kernel for every op of `ALL_OPS`; where `mutable_buffers` is False those that quantise may be missing."""

    @abstractmethod
    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        """Zero-filled memory on the current device, starting on a 64-byte boundary, which stays where it is; `pinned`
        asks for host memory that the device copies from and to asynchronously (plain host memory where `host_pinning`
        is not claimed).

        Raises MemoryError, or the framework's own error of that (torch.OutOfMemoryError, XLA's RESOURCE_EXHAUSTED),
        where there is no room; the device works on after it.
        """

    @abstractmethod
    def device_count(self) -> int:
        """How many devices of this kind the process sees."""

    @abstractmethod
    def current_device(self) -> DeviceId: ...

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Let this process work on device `index` from now on. Raises ShardingError for one that does not exist; does
        nothing where devices have no index."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until everything queued on the current device has run."""

    @abstractmethod
    def memory_stats(self) -> MemoryStats: ...

    @abstractmethod
    def reset_peak_memory(self) -> None: ...

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generators of every device of this process."""

    @abstractmethod
    def rng_state(self) -> bytes:
        """The present state of the generators from which this process draws, for `set_rng_state`: the current
        device's, and the host's, from which data loaders draw. Reading it draws nothing, and equal states are equal
        bytes."""

    @abstractmethod
    def set_rng_state(self, state: bytes) -> None:
        """Let the generators go on from `state`. Raises ShardingError, and leaves them as they were, for bytes that
        this accelerator did not give."""

    @abstractmethod
    def new_stream(self) -> Stream: ...

    @abstractmethod
    def current_stream(self) -> Stream: ...

    # What has a default.

    def wrap(self, array: Any) -> Buffer:
        """A buffer over the memory of a framework's array, flattened, without a copy.

        Raises PluginContractError for an array this accelerator does not know, ShardingError when it is not contiguous.
        """
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        hint = (
            "give it a `wrap` that knows this array, or a `torch_device_type` of None if torch does not see its memory"
        )
        raise PluginContractError(f"accelerator {self.name!r} cannot wrap a {kind}", hint=hint, value=kind)

    def import_array(self, array: Any) -> Buffer:
        """A buffer to read from, over the memory of another framework's array on this device, flattened: DLPack.

        Raises PluginContractError where the device's memory has no such exchange.
        """
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise PluginContractError(f"accelerator {self.name!r} cannot import a {kind}", value=kind)

    def from_host_memory(self, memory: Any, dtype: DType) -> Buffer:
        """A buffer over the bytes of a writable numpy array of uint8, which it keeps alive: memory that another library
        or process has made. Raises PluginContractError where the device cannot work on host memory."""
        raise PluginContractError(f"accelerator {self.name!r} does not work on host memory", value=dtype)

    @property
    def works_on_host_memory(self) -> bool:
        """Whether `from_host_memory` is provided: ranks on one host can then share memory."""
        return type(self).from_host_memory is not Accelerator.from_host_memory

    def matrix_kernels(self, choice: MatrixChoice) -> KernelTable:
        """Kernels of `MATRIX_OPS` to use for float32 in place of the framework's own matrix products; often none.

        "on": every such kernel. "auto": those that are at least `LEAST_SPEEDUP` times as fast on this machine, which
        may be measured first, in less than half a second. "off": none. But for "off" also those of `GROUPED_OPS`, all
        or none, by which experts then compute.
        """
        return KernelTable(self.name, {})

    def supported_dtypes(self) -> frozenset[DType]:
        return self.capabilities().dtypes

    def close(self) -> None:  # noqa: B027 - most accelerators hold nothing
        """Release the resources of the accelerator. The process may go on without it."""

    # The names that DeepSpeed's users call on `get_accelerator()`.

    def device_name(self, index: int | None = None) -> str:
        """The device's name for `tensor.to(...)`, such as `cuda:1`; begins with the accelerator's own name where torch
        does not know the device."""
        return str(DeviceId(self.torch_device_type or self.name, index))

    def is_available(self) -> bool:
        return self.probe().usable

    def is_bf16_supported(self) -> bool:
        return DType.BFLOAT16 in self.supported_dtypes()

    def is_fp16_supported(self) -> bool:
        return DType.FLOAT16 in self.supported_dtypes()

    def communication_backend_name(self) -> str:
        return self.capabilities().default_comm

    def memory_allocated(self) -> int:
        return self.memory_stats().allocated_nbytes

    def max_memory_allocated(self) -> int:
        return self.memory_stats().peak_nbytes

    def total_memory(self) -> int:
        return self.memory_stats().total_nbytes

    def available_memory(self) -> int:
        return self.memory_stats().free_nbytes


@dataclass(frozen=True)
class NullEvent(Event):
    """The event of a synchronous device: already reached. Holds the host time so that `elapsed_ms` is right."""

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
    """The only queue of a device without streams: waiting for a part of its work is waiting for all of it."""

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
    """The frameworks whose models train on such a device: "torch" where torch has a device for it
    (`torch_device_type`), "jax" where JAX has (`jax_platform`) or its arrays can be read there (`import_array`)."""
    torch = kind.torch_device_type is not None
    jax = kind.jax_platform is not None or kind.import_array is not Accelerator.import_array
    return tuple(name for name, trains in (("torch", torch), ("jax", jax)) if trains)


def describe(capabilities: Capabilities) -> Mapping[str, str]:
    """The capabilities as short strings, for tables and reports."""
    flags = ("streams", "mutable_buffers", "host_pinning", "symmetric_memory")
    yes = {flag: "yes" if getattr(capabilities, flag) else "no" for flag in flags}
    dtypes = ", ".join(sorted(dtype.value for dtype in capabilities.dtypes))
    return {"dtypes": dtypes, "default comm": capabilities.default_comm, **yes}
