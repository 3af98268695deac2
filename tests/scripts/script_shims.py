"""Stand-ins for what the scripts need and this machine lacks: devices, packages, data sets. None is about DeepSpeed.

Each shim is a function by its name in `scripts.toml`. `devices` stands for CUDA on a CPU; the others are named after
what they replace.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import metadata
from typing import Any
from unittest.mock import MagicMock

import torch

SHIMS: dict[str, Callable[[], None]] = {}


def shim(function: Callable[[], None]) -> Callable[[], None]:
    """Give a shim its name."""
    SHIMS[function.__name__.rstrip("_")] = function
    return function


def install(names: Sequence[str]) -> None:
    """Put shims in place before the script, and before DeepSpeed is imported. `absent:NAME` stands for a package."""
    torchvision_without_operators()
    for name in names:
        if name.startswith("absent:"):
            absent(name.removeprefix("absent:"))
        elif name in SHIMS:
            SHIMS[name]()
        elif name != "joined":
            raise KeyError(f"no shim of this name: {name}")


def torchvision_without_operators() -> None:
    """Let torchvision be imported where its compiled operators, which no script uses, fit another build of torch."""
    try:
        build = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        return
    if torch.version.cuda is None and "+cpu" not in build:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def install_late(names: Sequence[str], deepspeed: Any) -> None:
    """Put those in place that need the package: the backend that a script with CUDA asks for is gloo here."""
    if "devices" in names:
        start = deepspeed.init_distributed

        @functools.wraps(start)
        def started(dist_backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            return start(None if dist_backend == "nccl" else dist_backend, *args, **kwargs)

        deepspeed.init_distributed = started
        # As on a GPU: the real package asks for instructions that few CPUs have.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


def join(names: Sequence[str], deepspeed: Any) -> None:
    """Let `deepspeed.comm` meet before the script, as Accelerate does it where there are devices."""
    if "joined" in names:
        deepspeed.init_distributed(dist_backend="gloo")


class _Absent(types.ModuleType):
    """A package of which every name is a mock, at any depth."""

    __path__ = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder:
    """Finds the modules of an absent package."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.package and not name.startswith(f"{self.package}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def absent(package: str) -> None:
    """Stand for a package that reports, draws or logs: nothing of it reaches a loss."""
    sys.meta_path.insert(0, _Finder(package))  # type: ignore[arg-type]


def _is_cuda(device: Any) -> bool:
    if isinstance(device, bool):
        return False
    return isinstance(device, int) or (isinstance(device, str | torch.device) and str(device).startswith("cuda"))


def _on_the_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return called


def _moved(function: Any) -> Any:
    @functools.wraps(function)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if _is_cuda(argument) else argument for argument in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(self, *args, **kwargs)

    return called


class _Nothing:
    """An event or a stream of a device that is not there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        return None

    def wait(self, *args: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, other: Any) -> float:
        return 1.0


_FACTORIES = "tensor zeros ones empty full rand randn randint arange linspace as_tensor eye randperm scalar_tensor"
_LIKES = "zeros_like ones_like empty_like full_like rand_like randn_like"
_QUIET = (
    "synchronize empty_cache set_device manual_seed manual_seed_all reset_peak_memory_stats reset_max_memory_allocated"
)
_ZERO = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached"


@shim
def devices() -> None:
    """A CPU in place of each CUDA device, gloo in place of NCCL."""
    from torch import nn
    from torch.utils._device import _device_constructors

    _device_constructors()  # kept by torch: `with torch.device("meta")` knows the factories as they are, not these
    for name in f"{_FACTORIES} {_LIKES}".split():
        setattr(torch, name, _on_the_cpu(getattr(torch, name)))
    for owner in (torch.Tensor, nn.Module):
        owner.to = _moved(owner.to)  # type: ignore[method-assign]
        owner.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    for name in _QUIET.split():
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name in _ZERO.split():
        setattr(torch.cuda, name, lambda *args, **kwargs: 0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 2
    torch.cuda.get_device_name = lambda *args: "a CPU"
    torch.cuda.Event = _Nothing  # type: ignore[misc, assignment]
    torch.cuda.Stream = _Nothing  # type: ignore[misc, assignment]
    torch.cuda.device = lambda *args: nullcontext()  # type: ignore[assignment, misc]
    start = torch.distributed.init_process_group

    @functools.wraps(start)
    def started(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return start("gloo" if backend == "nccl" else backend, *args, **kwargs)

    torch.distributed.init_process_group = started
    load = torch.load

    @functools.wraps(load)
    def loaded(file: Any, map_location: Any = None, **kwargs: Any) -> Any:
        return load(file, "cpu" if _is_cuda(map_location) else map_location, **kwargs)

    torch.load = loaded
