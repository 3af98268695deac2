"""What autograd keeps in the place of a compressed weight: a note of how to compute it again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from polyaccel.errors import PolyaccelError


class _Note:
    """Stands for a tensor in the memory of a compressed weight; `kept` is what the hooks in force saved of the layer's
    own, which had then the version `version`."""

    def __init__(self, tensor: Tensor, kept: Any, version: int) -> None:
        self.place = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.kept, self.version = kept, version


def noted(
    weight: Tensor, compressed: Tensor, again: Callable[[Tensor], Tensor]
) -> AbstractContextManager[Any]:  # nothing where no hooks may be
    """Return hooks that save a note of a compressed weight, and anything else as the hooks in force do."""
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return nullcontext()
    outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # None where there are none
    memory = compressed.untyped_storage().data_ptr()

    def pack(tensor: Tensor) -> Any:
        if tensor.layout is torch.strided and tensor.numel() and tensor.untyped_storage().data_ptr() == memory:
            return _Note(tensor, outer[0](weight.detach()) if outer else weight.detach(), weight._version)
        return outer[0](tensor) if outer else tensor

    def unpack(saved: Any) -> Tensor:
        if not isinstance(saved, _Note):
            return outer[1](saved) if outer else saved  # type: ignore[no-any-return]
        own = outer[1](saved.kept) if outer else saved.kept
        if not outer and own._version != saved.version:
            raise PolyaccelError(
                "a compressed weight was updated between its forward and its backward pass",
                hint="call backward before the update, once for each forward",
            )
        return again(own).contiguous().as_strided(*saved.place)

    return saved_tensors_hooks(pack, unpack)
