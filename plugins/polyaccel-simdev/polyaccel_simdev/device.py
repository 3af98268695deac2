"""Makes `torch.device("simdev")`: importing this names torch's spare device, and gives it `torch.simdev` and a
`torch.distributed` backend, `simcomm`."""

from __future__ import annotations

import atexit
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

torch.utils.rename_privateuse1_backend("simdev")

from polyaccel_simdev import _device  # noqa: E402 - it registers operators for the device just named

_AUTOCAST_OPS = ("mm", "matmul", "addmm", "bmm", "baddbmm", "linear", "scaled_dot_product_attention")


def _index(device: Any) -> int:
    """The number of a device given as torch allows: an index, a name, a `torch.device`, or None for the current one."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return _device.current_device() if index is None else index


class _Chosen(AbstractContextManager[None]):
    """`with torch.simdev.device(1):`. None changes nothing."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = _device.current_device()
        _device.set_device(self._index)

    def __exit__(self, *error: object) -> None:
        _device.set_device(self._before)


class _Module:
    """`torch.simdev`: what torch's documentation of accelerators asks of a device's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return _device.device_count()

    def current_device(self) -> int:
        return _device.current_device()

    def device(self, device: Any) -> AbstractContextManager[None]:
        return _Chosen(device)

    def set_device(self, device: Any) -> None:
        _device.set_device(_index(device))

    def synchronize(self, device: Any = None) -> None:
        _device.synchronize(_index(device))

    def Stream(self, device: Any = None) -> torch.Stream:  # noqa: N802 - torch's name
        return torch.Stream(device=torch.device("simdev", _index(device)))

    def Event(self, enable_timing: bool = False) -> torch.Event:  # noqa: N802
        return torch.Event("simdev", enable_timing=enable_timing)

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(_index(device))

    def stream(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        return stream

    def manual_seed(self, seed: int) -> None:
        _device.default_generator(-1).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            _device.default_generator(index).manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return _device.default_generator(_index(device)).get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        _device.default_generator(_index(device)).set_state(state)

    def memory_allocated(self, device: Any = None) -> int:
        return _device.memory(_index(device))[0]

    def max_memory_allocated(self, device: Any = None) -> int:
        return _device.memory(_index(device))[1]

    def memory_reserved(self, device: Any = None) -> int:
        return self.memory_allocated(device)  # nothing is kept

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        _device.reset_peak(_index(device))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """(free, total) bytes."""
        allocated, _, _, capacity = _device.memory(_index(device))
        return capacity - allocated, capacity

    def empty_cache(self) -> None:
        return None

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _lower_precision(op: Any) -> Any:
    """`op` with floating tensors of the device cast to autocast's type first."""
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(value: Any) -> Any:
        wants = isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == "simdev"
        return value.to(torch.get_autocast_dtype("simdev")) if wants else value

    def run(*args: Any, **named: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below):
            return op(*map(cast, args), **{name: cast(value) for name, value in named.items()})

    return run


def _make_comm(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return _device.make_comm(dist.ProcessGroupGloo(dist.PrefixStore("simcomm", store), rank, size, timeout), rank, size)


# A thread of a queue that released tensors after the interpreter's end would end the process by SIGABRT.
atexit.register(_device.end_queues)
torch._register_device_module("simdev", _Module())
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

# torch.library undoes a registration when its object is collected.
_through = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
_through.fallback(torch.library.fallthrough_kernel)
_cast = torch.library.Library("aten", "IMPL")
for _name in _AUTOCAST_OPS:
    _cast.impl(_name, _lower_precision(getattr(torch.ops.aten, _name)), "AutocastPrivateUse1")

dist.Backend.register_backend("simcomm", _make_comm, devices=["simdev"])
