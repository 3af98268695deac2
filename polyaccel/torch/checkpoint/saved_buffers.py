"""The module's persistent buffers to and from a checkpoint, whole and from rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import getLogger
from typing import Any

from torch import Tensor, nn

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.memory.torch import dtype_of
from polyaccel.checkpoint.format.torch_values import packed, unpacked
from polyaccel.checkpoint.load.custom_load import BUFFER, CustomLoadReader
from polyaccel.checkpoint.load.name_map import ReadItem, RenamedReader
from polyaccel.errors import CheckpointError
from polyaccel.torch.sharding.buffers import plain_values, set_plain_values, strided_tensors
from polyaccel.torch.sharding.module_adapter import TorchAdapter

log = getLogger(__name__)

Reader = RenamedReader | CustomLoadReader
"""A checkpoint as seen by this run's parameters and buffers."""
_BLOB = "module_extra_states"
_KEY = "_extra_state"  # torch's name of it in a state dict


def module_buffers(adapter: TorchAdapter) -> dict[str, Tensor]:
    """Return the strided tensors of persistent buffers by name, after parameters are up to date."""
    parameters = set(map(id, adapter.names))
    buffers = []
    for name, value in adapter.module.state_dict(keep_vars=True).items():
        if id(value) in parameters or is_extra_state(name):
            continue
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            hint = "keep it in client_state, in get_extra_state, or in tensors registered as buffers"
            raise CheckpointError(f"the module's state {name!r} is a {kind}", hint=hint, value=kind)
        buffers.append((name, value))
    return dict(strided_tensors(buffers))


def saved_buffers(adapter: TorchAdapter, reader: Reader) -> dict[str, Tensor]:
    """The module's buffers that were saved, verified. Raises CheckpointError where one has another shape."""
    found = {}
    for name, tensor in module_buffers(adapter).items():
        if not reader.has(name, BUFFER):
            log.warning("the checkpoint has no buffer %r; it keeps its value", name)
            continue
        shape, values = reader.tensor(name, BUFFER).shape, plain_values(tensor)
        if shape != tuple(values.shape):
            raise CheckpointError(
                f"the buffer {name!r} has the shape {shape} in checkpoint {reader.tag!r}, and "
                f"{tuple(values.shape)} in the model",
                hint="build the model that was saved",
                value=shape,
            )
        reader.verify(_item(name, values))
        found[name] = tensor
    return found


def read_buffer(accelerator: Accelerator, reader: Reader, name: str, tensor: Tensor) -> None:
    present = plain_values(tensor)
    item = _item(name, present)
    flat = accelerator.allocate(item.length, item.dtype)
    reader.read_into(item, flat, accelerator.allocate)
    set_plain_values(tensor, flat.raw.view(present.shape))


def _item(name: str, values: Tensor) -> ReadItem:
    return ReadItem(name, BUFFER, 0, values.numel(), dtype_of(values.dtype))


def is_extra_state(name: str) -> bool:
    """Whether that key of a state dict is the extra state of a module."""
    return name.rpartition(".")[2] == _KEY


def extra_state_blobs(module: nn.Module) -> dict[str, bytes]:
    """Encode the extra states of `module`'s parts, if any."""
    states = {name: part.get_extra_state() for name, part in module.named_modules() if _has_extra_state(part)}
    for name, state in states.items():
        try:
            packed(state, "it")
        except CheckpointError as error:
            raise CheckpointError(
                f"get_extra_state of {name or 'the model'!r} returned what a checkpoint cannot hold: {error.message}",
                hint="return tensors, numbers, strings, and lists and dicts of them",
                value=name,
            ) from error
    return {_BLOB: packed(states, "the extra states of modules")} if states else {}


def merged_blobs(gathered: Sequence[Mapping[str, bytes]]) -> dict[str, bytes]:
    """What `extra_state_blobs` gives of a module, from that of each of its parts."""
    states: dict[str, Any] = {}
    for blobs in gathered:
        for blob in blobs.values():
            states |= unpacked(blob, "the extra states of modules")
    return {_BLOB: packed(states, "the extra states of modules")} if states else {}


def saved_extra_states(module: nn.Module, blobs: Mapping[str, bytes]) -> dict[str, Any]:
    """Return saved extra states by part of `module`."""
    if _BLOB not in blobs:
        return {}
    states: dict[str, Any] = unpacked(blobs[_BLOB], "the extra states of modules")
    return {name: states[name] for name, part in module.named_modules() if _has_extra_state(part) and name in states}


def set_extra_states(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Hand each state to its part of `module`."""
    for name, state in states.items():
        module.get_submodule(name).set_extra_state(state)


def _has_extra_state(part: nn.Module) -> bool:
    return type(part).get_extra_state is not nn.Module.get_extra_state
