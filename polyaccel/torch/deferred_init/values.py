"""Parameters without memory, as the engine finds them: their values, their place, and modules built on meta."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.errors import PolyaccelError
from polyaccel.torch.deferred_init.init import Construction
from polyaccel.torch.deferred_init.log import FakeStorage, replay
from polyaccel.torch.deferred_init.tensor import DeferredTensor, make_deferred, put


def is_deferred(tensor: Tensor) -> bool:
    """Whether `tensor` was made inside zero.Init and has no memory yet."""
    return isinstance(tensor, DeferredTensor)


def value_of(tensor: Tensor) -> Tensor:
    """The tensor, detached, with its values in memory; of a deferred one, computed in its own memory."""
    return replay(tensor.place) if isinstance(tensor, DeferredTensor) else tensor.detach()


def prepare(model: nn.Module) -> None:
    """Make a model ready: nothing on the meta device, nothing deferred but parameters."""
    adopt_meta(model)
    materialise_buffers(model)


def materialise_buffers(model: nn.Module) -> None:
    """Give memory to every deferred tensor of `model` that is not a parameter: buffers and plain attributes."""
    for module in model.modules():
        attributes = {name: value for name, value in vars(module).items() if name not in ("_parameters", "_modules")}
        for tensor in _deferred_in(attributes):
            put(tensor, value_of(tensor))


def _deferred_in(value: Any) -> Iterator[DeferredTensor]:
    """Deferred tensors in nested lists, tuples and dicts, except parameters."""
    if isinstance(value, DeferredTensor):
        if not isinstance(value, nn.Parameter):
            yield value
    elif isinstance(value, dict):
        for item in list(value.values()):
            yield from _deferred_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _deferred_in(item)


def adopt_meta(model: nn.Module) -> None:
    """Defer a meta model's tensors to `reset_parameters`, in the order of `model.modules()`."""
    names = {module: name for name, module in model.named_modules()}
    owners = [module for module in names if any(tensor.is_meta for tensor in _own_tensors(module).values())]
    memories: dict[int, FakeStorage] = {}
    with Construction():
        for module in owners:
            for tensor in _own_tensors(module).values():
                if tensor.is_meta:
                    _adopt(tensor, memories)
        for module in owners:
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if reset is not None:
                with torch.no_grad():
                    reset()
    for module in owners:
        for name, tensor in _own_tensors(module).items():
            if isinstance(tensor, DeferredTensor) and not tensor.place.memory.history:
                fqn = f"{names[module]}.{name}" if names[module] else name
                raise PolyaccelError(
                    f"{fqn!r} of a {type(module).__name__} is on the meta device, and the module has no "
                    "reset_parameters that fills it",
                    hint="build the model inside polyaccel.zero.Init() instead, or load its weights before initialize",
                    value=fqn,
                )


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])


def _adopt(tensor: Tensor, memories: dict[int, FakeStorage]) -> None:
    """Make a tensor on the meta device a deferred one without contents, the same object."""
    meta = tensor.detach()
    storage = meta.untyped_storage()
    memory = memories.setdefault(storage._cdata, FakeStorage(torch.device("cpu"), storage.nbytes()))
    make_deferred(tensor, DeferredTensor(meta, memory))
