"""The module's persistent buffers to and from a checkpoint, whole and from rank 0."""

from __future__ import annotations

from logging import getLogger

from torch import Tensor

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.memory.torch import dtype_of
from polyaccel.checkpoint.load.custom_load import BUFFER, CustomLoadReader
from polyaccel.checkpoint.load.name_map import RenamedReader
from polyaccel.checkpoint.load.read_item import ReadItem
from polyaccel.errors import CheckpointError
from polyaccel.torch.checkpoint.extra_states import is_extra_state
from polyaccel.torch.sharding.buffers import plain_values, set_plain_values, strided_tensors
from polyaccel.torch.sharding.module_adapter import TorchAdapter

log = getLogger(__name__)

Reader = RenamedReader | CustomLoadReader
"""A checkpoint as seen by this run's parameters and buffers."""


def module_buffers(adapter: TorchAdapter) -> dict[str, Tensor]:
    """The strided tensors that hold the values of the module's persistent buffers, by name. Every parameter is up to
    date."""
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
