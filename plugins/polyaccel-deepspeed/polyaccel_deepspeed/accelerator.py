"""`deepspeed.accelerator`: polyaccel's accelerator by the names that DeepSpeed gives a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

import polyaccel
from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.errors import PolyaccelError
from polyaccel_deepspeed.op_builder import builder_class


class DeepSpeedAccelerator:
    """A device as DeepSpeed's users ask for it. What torch has of it is torch's own, from `torch.cuda` and its like."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._name = accelerator.torch_device_type or "cpu"
        self._communication_backend_name = accelerator.capabilities().default_comm
        self._compile_backend = "inductor"

    @property
    def _module(self) -> Any:
        """torch's module of the device; None for the CPU, whose work is done when a call returns."""
        return getattr(torch, self._name, None) if self._name != "cpu" else None

    # What kind of device it is.

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    def use_host_timers(self) -> bool:
        return self._name == "cpu"

    def resolves_data_dependency(self) -> bool:
        return self._name == "cpu"

    def handles_memory_backpressure(self) -> bool:
        return self._name == "cpu"

    def is_available(self) -> bool:
        return self._accelerator.is_available()

    def is_bf16_supported(self) -> bool:
        return self._accelerator.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return self._accelerator.is_fp16_supported()

    def is_fp64_supported(self) -> bool:
        return self._name != "mps"

    def prefer_triton_grouped_mm(self) -> bool:
        return False

    def is_triton_supported(self) -> bool:
        return self._name in ("cuda", "xpu")

    def supported_dtypes(self) -> list[torch.dtype]:
        halves = {torch.float16: self.is_fp16_supported(), torch.bfloat16: self.is_bf16_supported()}
        return [torch.float32, *(dtype for dtype, is_there in halves.items() if is_there)]

    def communication_backend_name(self) -> str:
        """torch's backend for this device."""
        return self._communication_backend_name

    # Devices.

    def device_name(self, device_index: int | str | None = None) -> str:
        """`cuda:1`, or `cuda` without an index; the CPU has one name."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which the device is the current one."""
        return self._module.device(device_index) if self._module is not None else nullcontext()

    def set_device(self, device_index: int) -> None:
        if self._module is not None:
            self._accelerator.set_device(device_index)

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0)) if self._module is None else int(self._module.current_device())

    def current_device_name(self) -> str:
        return self.device_name(None if self._module is None else self.current_device())

    def device_count(self) -> int:
        """On a CPU, the ranks of this host that a launcher has put into LOCAL_SIZE, as DeepSpeed counts."""
        ranks = int(os.environ.get("LOCAL_SIZE", "0")) if self._name == "cpu" else 0
        return ranks if ranks > 0 else self._accelerator.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        self._accelerator.synchronize()

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def torch_device(self) -> torch.device:
        """The device that modules are moved to; not in DeepSpeed."""
        return torch_device_of(self._accelerator)

    # Random numbers.

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> None:
        self._accelerator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self._accelerator.manual_seed(seed)

    def initial_seed(self) -> int:
        return int(torch.initial_seed() if self._module is None else self._module.initial_seed())

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        state: Tensor = torch.get_rng_state() if self._module is None else self._module.get_rng_state()
        return state

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        (torch if self._module is None else self._module).set_rng_state(new_state)

    def default_generator(self, device_index: int) -> torch.Generator:
        generator: torch.Generator = (
            torch.default_generator if self._module is None else self._module.default_generators[device_index]
        )
        return generator

    # Streams, which the CPU does not have.

    @property
    def Stream(self) -> Any:  # noqa: N802 - DeepSpeed's name
        return None if self._module is None else self._module.Stream

    @property
    def Event(self) -> Any:  # noqa: N802 - DeepSpeed's name
        return None if self._module is None else self._module.Event

    def stream(self, stream: Any) -> Any:
        return nullcontext() if self._module is None else self._module.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return None if self._module is None else self._module.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        return None if self._module is None else self._module.default_stream(device_index)

    # Memory, in bytes.

    def empty_cache(self) -> None:
        if self._module is not None:
            self._module.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._accelerator.memory_allocated()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._accelerator.max_memory_allocated()

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        self._accelerator.reset_peak_memory()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._accelerator.reset_peak_memory()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._accelerator.memory_stats().reserved_nbytes

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self.memory_reserved() if self._module is None else int(self._module.max_memory_reserved(device_index))

    memory_cached = memory_reserved
    max_memory_cached = max_memory_reserved
    reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> Mapping[str, Any]:
        return {} if self._module is None else dict(self._module.memory_stats(device_index))

    def total_memory(self, device_index: int | None = None) -> int:
        return self._accelerator.total_memory()

    def available_memory(self, device_index: int | None = None) -> int:
        return self._accelerator.available_memory()

    # Pinned memory, which is plain where the device reads the host's.

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """`tensor` in pinned memory, flat without `match_shape`. Its values are there without `make_copy` too."""
        pinned = tensor if self._module is None else tensor.pin_memory()
        return pinned if match_shape else pinned.flatten()

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device, pin_memory=self._module is not None)

    def pin_empty_like(self, tensor: Tensor, device: Any = "cpu", dtype: torch.dtype | None = None) -> Tensor:
        return self.pin_empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)

    def unpin_memory(self, tensor: Tensor) -> None:
        """Nothing to do: torch gives pinned memory back with its tensor."""

    def pin_memory_alignment(self) -> int:
        """The bytes at whose multiples pinned memory starts."""
        return 64

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._module is None or tensor.is_pinned()

    # Traces and delayed calls.

    @property
    def supports_nvtx_domain(self) -> bool:
        """False: ranges have no domains."""
        return False

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        """Begin a range of the profiler, where there is one."""
        return self._module.nvtx.range_push(msg) if hasattr(self._module, "nvtx") else None

    def range_pop(self, domain: Any = None) -> Any:
        return self._module.nvtx.range_pop() if hasattr(self._module, "nvtx") else None

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    # Tensor types of old.

    @property
    def BFloat16Tensor(self) -> Any:  # noqa: N802 - DeepSpeed's name
        return self._constructor(torch.bfloat16)

    @property
    def ByteTensor(self) -> Any:  # noqa: N802 - DeepSpeed's name
        return self._constructor(torch.uint8)

    @property
    def DoubleTensor(self) -> Any:  # noqa: N802 - DeepSpeed's name
        return self._constructor(torch.float64)

    @property
    def FloatTensor(self) -> Any:  # noqa: N802 - DeepSpeed's name
        return self._constructor(torch.float32)

    @property
    def HalfTensor(self) -> Any:  # noqa: N802 - DeepSpeed's name
        return self._constructor(torch.float16)

    @property
    def IntTensor(self) -> Any:  # noqa: N802 - DeepSpeed's name
        return self._constructor(torch.int32)

    @property
    def LongTensor(self) -> Any:  # noqa: N802 - DeepSpeed's name
        return self._constructor(torch.int64)

    def _constructor(self, dtype: torch.dtype) -> Callable[[Sequence[Any]], Tensor]:
        return lambda values: torch.tensor(values, dtype=dtype, device=self.current_device_name())

    # Graphs.

    def is_current_stream_capturing(self) -> bool:
        return self._module is not None and bool(self._module.is_current_stream_capturing())

    def create_graph(self) -> Any:
        return None if self._module is None else self._module.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return nullcontext() if self._module is None else self._module.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        if graph is not None:
            graph.replay()

    # Compilers, and kernels that are built ahead of time.

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise PolyaccelError(
                f"torch.compile has no backend {backend!r}", hint=f"use one of {', '.join(known)}", value=backend
            )
        self._compile_backend = backend

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> Any:
        return builder_class(class_name)()

    def get_op_builder(self, class_name: str) -> Any:
        return builder_class(class_name)

    # Launching.

    def export_envs(self) -> list[str]:
        return list(self._accelerator.exported_variables)

    def visible_devices_envs(self) -> list[str]:
        variable = self._accelerator.visible_devices_variable
        return [] if variable is None else [variable]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: Sequence[int]) -> None:
        for variable in self.visible_devices_envs():
            current_env[variable] = ",".join(map(str, local_accelerator_ids))


@cache
def _seen_as(accelerator: Accelerator) -> DeepSpeedAccelerator:
    return DeepSpeedAccelerator(accelerator)


def get_accelerator() -> DeepSpeedAccelerator:
    """The device that trains: DS_ACCELERATOR's, else the best that is present."""
    return _seen_as(polyaccel.get_accelerator())


def set_accelerator(accel_obj: Any) -> None:
    """Let this device train from now on. Raises PolyaccelError for one that polyaccel did not make."""
    if not isinstance(accel_obj, DeepSpeedAccelerator):
        hint = "pass CUDA_Accelerator() and its like; another device is a plugin: `polyaccel plugins new`"
        raise PolyaccelError(f"{type(accel_obj).__name__} is not an accelerator", hint=hint, value=accel_obj)
    polyaccel.set_accelerator(accel_obj._accelerator)


def is_current_accelerator_supported() -> bool:
    return True
