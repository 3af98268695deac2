"""Notes of where a gathered parameter stood, which autograd saves for the backward in place of its values.

[Note: Saved tensors by reference]
Autograd keeps a weight for the backward as a view of the gathered buffer, which is freed long before. So while modules
run that use sharded parameters, saved tensors that lie in gathered buffers are replaced by a note of bucket and place,
and found again when the backward asks for them; should the bucket not be whole at that time, that gathers it. Tensors
of other kinds go to the hooks that were in force before, so activation checkpointing and `save_on_cpu` keep working
inside. Where no hooks may be (inside `torch.func.grad` and its like), there are no notes, and autograd keeps the
parameter itself: a gathered parameter must stay whole then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import saved_tensors_hooks

from polyaccel.core.buffer import Buffer
from polyaccel.errors import ShardingError
from polyaccel.zero.buckets.unsharder import Unsharder

_MARK = "_polyaccel_saved_views"


class SavedView(NamedTuple):
    """A saved tensor that is a view of a gathered bucket. Offsets and strides count elements of the bucket."""

    bucket: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    update: int


class SavedViews:
    """Hooks on saved tensors that lie in buckets of `unsharder`."""

    def __init__(self, unsharder: Unsharder) -> None:
        self._unsharder = unsharder
        self._gathered = unsharder.gathered
        self._bucket_at: dict[int, int] = {}
        self._updates = 0

    def on_bound(self, index: int, view: Buffer) -> None:
        """A parameter of bucket `index` stands in `view`."""
        self._bucket_at[view.raw.untyped_storage().data_ptr()] = index

    def on_freed(self, index: int) -> None:
        """Bucket `index` is sharded again."""
        self._bucket_at = {pointer: bucket for pointer, bucket in self._bucket_at.items() if bucket != index}

    def on_update(self) -> None:
        """Parameters have changed: notes that were saved before must not be used any more."""
        self._updates += 1

    def enter(self) -> saved_tensors_hooks | None:
        """Put our hooks over those in force, unless ours are there already or none may be; the caller leaves them."""
        if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            return None
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is not None and getattr(outer[0], _MARK, None) is self:
            return None
        hooks = self._make_hooks(outer)
        hooks.__enter__()
        return hooks

    def _make_hooks(self, outer: Sequence[Callable[[Any], Any]] | None) -> saved_tensors_hooks:
        def pack(tensor: Tensor) -> Any:
            index = self._bucket_of(tensor)
            if index is None:
                return outer[0](tensor) if outer else tensor
            full = self._gathered.full(index).raw
            is_elsewhere = tensor.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()
            if is_elsewhere or tensor.dtype is not full.dtype:  # a view whose elements count otherwise
                return tensor.clone()
            offset = tensor.storage_offset() - full.storage_offset()
            return SavedView(index, offset, tensor.size(), tensor.stride(), self._updates)

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, SavedView):
                return self._restore(saved)
            if outer is None or isinstance(saved, Tensor):
                return saved  # type: ignore[no-any-return]
            return outer[1](saved)  # type: ignore[no-any-return]

        setattr(pack, _MARK, self)
        return saved_tensors_hooks(pack, unpack)

    def _bucket_of(self, tensor: Tensor) -> int | None:
        """The gathered bucket that `tensor` lies in, if any."""
        if tensor.layout is not torch.strided or is_functorch_wrapped_tensor(tensor):
            return None
        index = self._bucket_at.get(tensor.untyped_storage().data_ptr())
        return index if index is not None and self._gathered.is_whole(index) else None

    def _restore(self, saved: SavedView) -> Tensor:
        if saved.update != self._updates:
            raise ShardingError(
                "a parameter needed for this backward pass was updated since its forward pass",
                hint="call backward before engine.step(), once for each forward",
            )
        if not self._gathered.is_whole(saved.bucket):
            self._unsharder.unshard_until_end(saved.bucket)
        full = self._gathered.full(saved.bucket).raw
        return full.as_strided(saved.size, saved.stride, full.storage_offset() + saved.offset)  # type: ignore[no-any-return]
