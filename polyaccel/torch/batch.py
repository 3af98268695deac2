"""What goes into a module and comes out of it: moving, casting, finding the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from polyaccel.accelerators.base import Accelerator
from polyaccel.errors import PluginContractError, PolyaccelError


def device_of(accelerator: Accelerator) -> torch.device:
    """The torch device that modules live on. Raises PluginContractError for an accelerator that torch does not know."""
    if accelerator.torch_device_type is None:
        raise PluginContractError(
            f"accelerator {accelerator.name!r} has no torch device", cure="choose one that torch knows, such as cpu"
        )
    index = accelerator.current_device().index
    kind = accelerator.torch_device_type
    return torch.device(kind) if index is None else torch.device(kind, index)


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch`, any nesting of containers, with its tensors on `device`."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """`values`, any nesting of containers, with its floating tensors as `dtype`."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)


def at_least_float32(loss: Tensor) -> Tensor:
    """`loss` in a type in which it can be scaled: float32 for 16-bit ones, else its own."""
    return loss.float() if loss.dtype.itemsize < torch.float32.itemsize else loss


def loss_of(outputs: Any) -> Tensor:
    """The loss among a module's outputs: the tensor itself, `outputs.loss`, `outputs["loss"]`, or the first of a tuple.

    Raises PolyaccelError when there is none.
    """
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)) and not hasattr(outputs, "loss"):
        found = outputs[0] if outputs else None
    elif not isinstance(outputs, Tensor):
        found = getattr(outputs, "loss", None)
    if not isinstance(found, Tensor):
        kind = type(outputs).__name__
        cure = "let the module return its loss: alone, first in a tuple, or as `loss`"
        raise PolyaccelError(f"the module returned a {kind} without a loss", cure=cure, value=kind)
    return found
