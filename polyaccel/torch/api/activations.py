"""Activation checkpointing: regions of a model whose activations are computed again in backward instead of kept.

What is left of a region until its backward are its inputs. With offload (`activation_checkpointing.cpu_checkpointing`)
those wait in host memory; on a device whose memory is the host's there is nowhere to move them, and they stay.

[Note: Inputs in host memory]
A region's inputs pass through hooks on saved tensors: packed, they are copied to (pinned) host memory on a stream of
their own while the region runs, and what is queued after the region waits for that; unpacked, they are copied back, and
the inputs of the region before, which backward needs next, follow while this one is computed again. Should nobody wait
for those, `record_stream` keeps their memory until the copy has run. Only inputs that the model computed are moved.
Parameters, masks and the like often serve many regions, so copies would multiply them; they go to the hooks that were
in force before, those of sharded parameters for example. A region inside another is dropped and recomputed with it,
hence moves nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from polyaccel.accelerators import get_accelerator
from polyaccel.accelerators.base import Accelerator, Event
from polyaccel.accelerators.torch_device import TorchStream
from polyaccel.config import load_config
from polyaccel.errors import ConfigError, Problem

log = getLogger(__name__)


class HostCopy:
    """A tensor that waits in host memory, and its way back."""

    def __init__(self, region: Region, memory: Tensor, device: torch.device) -> None:
        self.region = region
        self.memory = memory
        self.device = device
        self.is_used = False
        self.fetched: tuple[Tensor, Event] | None = None
        """On the device again, once the event is reached."""


class HostCopies:
    """The host copies of one device's regions. See [Note: Inputs in host memory]."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pins = accelerator.capabilities().host_pinning
        self._stream = accelerator.new_stream()
        self._last: weakref.ref[Region] | None = None

    def region(self, inputs: tuple[Any, ...]) -> Region:
        """A new region, which follows the one that was made last."""
        region = Region(self, inputs, None if self._last is None else self._last())
        self._last = weakref.ref(region)
        return region

    def copy(self, tensor: Tensor, region: Region) -> HostCopy:
        """Start copying `tensor` to the host. It must stay as it is until `settle`."""
        memory = torch.empty_like(tensor, device="cpu", pin_memory=self._pins)
        self._move(tensor, memory)
        return HostCopy(region, memory, tensor.device)

    def settle(self) -> None:
        """Let the device's work that is queued from now on wait for all copies."""
        self._accelerator.current_stream().wait(self._stream.record())

    def fetch(self, copy: HostCopy) -> None:
        """Start copying back, unless that was done."""
        if copy.fetched is None:
            tensor = torch.empty_like(copy.memory, device=copy.device)
            copy.fetched = tensor, self._move(copy.memory, tensor)
            if isinstance(self._stream, TorchStream):
                tensor.record_stream(self._stream.raw)

    def take(self, copy: HostCopy) -> Tensor:
        """The tensor on the device; work that is queued from now on sees its values."""
        self.fetch(copy)
        assert copy.fetched is not None  # by now
        tensor, arrived = copy.fetched
        copy.fetched, copy.is_used = None, True
        self._accelerator.current_stream().wait(arrived)
        return tensor

    def _move(self, source: Tensor, target: Tensor) -> Event:
        self._stream.wait(self._accelerator.current_stream().record())
        with self._stream.use(), torch.no_grad():
            target.copy_(source, non_blocking=self._pins)
        return self._stream.record()


class Region:
    """One checkpointed region in one forward pass; `inputs` are its arguments."""

    def __init__(self, copies: HostCopies, inputs: tuple[Any, ...], previous: Region | None) -> None:
        self._host = copies
        self._previous = None if previous is None else weakref.ref(previous)
        self._moved = {_place(leaf) for leaf in inputs if _is_computed(leaf)}
        self._copies: list[weakref.ref[HostCopy]] = []

    def hooks(self) -> saved_tensors_hooks:
        """Hooks that move the inputs, over those in force."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def pack(tensor: Tensor) -> Any:
            if _place(tensor) in self._moved:
                copy = self._host.copy(tensor.detach(), self)
                self._copies.append(weakref.ref(copy))
                return copy
            return outer[0](tensor) if outer else tensor

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, HostCopy):
                tensor = self._host.take(saved)
                if self._previous is not None and (previous := self._previous()) is not None:
                    previous.prefetch()
                return tensor
            return outer[1](saved) if outer else saved

        return saved_tensors_hooks(pack, unpack)

    def prefetch(self) -> None:
        """Start copying back what has not been used yet."""
        for reference in self._copies:
            copy = reference()
            if copy is not None and not copy.is_used:
                self._host.fetch(copy)


class ActivationOffload:
    """Offload of regions' inputs on `accelerator`; `regions` counts those that ran under it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.regions = 0
        self.copies = None if is_in_host_memory(accelerator) else HostCopies(accelerator)
        self._has_warned = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Regions in this block are offloaded. Says once if there are none, for then the setting does nothing."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)
        if not self.regions and torch.is_grad_enabled() and not self._has_warned:
            self._has_warned = True
            log.warning(
                "activation_checkpointing.cpu_checkpointing is on, but the model ran no region of "
                "polyaccel.checkpointing.checkpoint, so nothing is offloaded"
            )


_active: ContextVar[ActivationOffload | None] = ContextVar("polyaccel_activation_offload", default=None)
"""That of the engine whose forward is running."""
_inside: ContextVar[bool] = ContextVar("polyaccel_inside_region", default=False)
_configured: list[ActivationOffload | None] = []
"""The last call of `configure` in this process: one entry, or none."""


def is_in_host_memory(accelerator: Accelerator) -> bool:
    """Whether the accelerator's memory is the host's, so that there is nowhere to move anything."""
    return accelerator.torch_device_type == "cpu"


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, whose activations are computed again in backward instead of kept.

    Tensors among `args` are kept until then, in host memory if offload is configured. Random numbers come out alike
    both times. Nested use and use without gradients are fine.
    """
    offload = _configured[0] if _configured else _active.get()
    run = partial(_run_inside, function)
    if offload is not None:
        offload.regions += 1
        if offload.copies is not None and torch.is_grad_enabled() and not _inside.get():
            with offload.copies.region(args).hooks():
                outputs = torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)
            offload.copies.settle()
            return outputs
    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)


def configure(
    mpu_: Any = None,
    deepspeed_config: str | Path | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say for the whole process how `checkpoint` works; goes before what engines' configs say.

    `checkpoint_in_cpu` offloads inputs to the host; where it is None, `deepspeed_config` decides. The other arguments
    are DeepSpeed's and must ask for nothing. Raises ConfigError for one that does.
    """
    section = load_config(deepspeed_config or {}).activation_checkpointing
    asked = {
        "mpu_": mpu_,
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "synchronize": synchronize,
        "profile": profile,
    }
    problems = [
        Problem(name, value, "is not available in this version", "leave it out")
        for name, value in asked.items()
        if value
    ]
    if problems:
        raise ConfigError(problems, source="checkpointing.configure")
    offloads = section.cpu_checkpointing if checkpoint_in_cpu is None else checkpoint_in_cpu
    _configured[:] = [ActivationOffload(get_accelerator()) if offloads else None]


def is_configured() -> bool:
    """Whether `configure` was called."""
    return bool(_configured)


def reset() -> None:
    """Forget what `configure` said: engines' configs decide again."""
    _configured.clear()


def _run_inside(function: Callable[..., Any], *args: Any) -> Any:
    """Both times: backward may run in another thread, where context variables stand at their defaults."""
    token = _inside.set(True)
    try:
        return function(*args)
    finally:
        _inside.reset(token)


def _is_computed(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and leaf.grad_fn is not None


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
