"""Where sharded parameters are gathered: around the forward and the backward of the modules that use them.

[Note: Forward]
A *site* is a module and the buckets that it needs: a unit with all its parameters, or a module outside of the units
with its own. Before its forward the buckets are held, after it they are dropped, also when it raised.

[Note: What autograd saves]
Autograd keeps a weight for the backward as a view of the gathered buffer, whose memory serves another bucket by then.
So while a site runs, saved tensors that lie in gathered buffers are replaced by a note of bucket and place, and found
again when the backward asks for them; should the bucket not be whole at that time, that gathers it. Tensors of other
kinds go to the hooks that were there before, so activation checkpointing and `save_on_cpu` keep working inside.

[Note: Backward]
The gradient of a site's output means that its backward begins, and the buckets are held. It is over when the gradient
of its input appears or its last parameter gradient has arrived, whatever comes first. Both are only a matter of speed
and memory: a weight that is needed earlier or later is gathered because autograd asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from polyaccel.buffer import Buffer
from polyaccel.errors import ShardingError
from polyaccel.zero.step import ZeroStep

log = getLogger(__name__)


@dataclass(eq=False)
class Site:
    """A module and the sharded buckets that its forward needs."""

    name: str
    buckets: list[int]
    in_backward: bool = False


@dataclass(eq=False)
class Call:
    """A site whose forward is running; `held` is what will be dropped after it."""

    site: Site
    held: list[int] = field(default_factory=list)
    hooks: saved_tensors_hooks | None = None


class SavedView(NamedTuple):
    """A saved tensor that is a view of a gathered bucket. Offsets and strides count elements of the bucket."""

    bucket: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    update: int


class Sites:
    """The sites of `module`, by hooks on its parts. `buckets_of` gives the sharded buckets of a part, by its full
    name."""

    def __init__(self, module: nn.Module, step: ZeroStep, buckets_of: dict[str, list[int]]) -> None:
        self._step = step
        self._gathering = step.params.gathering
        self._calls: list[Call] = []
        self._storages: dict[int, int] = {}
        self._loose: list[int] = []
        """Held for a backward pass by nobody in particular."""
        self._updates = 0
        self._handles: list[Any] = []
        self._of_bucket: dict[int, list[Site]] = {}
        for name, part in module.named_modules():
            buckets = buckets_of.get(name, [])
            if buckets or part is module:
                site = Site(name, list(buckets))
                for index in buckets:
                    self._of_bucket.setdefault(index, []).append(site)
                self._handles += self._hook(part, site)

    def release(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # What the adapter reports.

    def on_bound(self, index: int, view: Buffer) -> None:
        """A parameter of a bucket was given values in `view`."""
        self._storages[view.raw.untyped_storage().data_ptr()] = index

    def on_freed(self, index: int) -> None:
        """A bucket is sharded again."""
        self._storages = {pointer: bucket for pointer, bucket in self._storages.items() if bucket != index}

    def on_gradient(self, index: int) -> None:
        """A gradient of bucket `index` arrived: leave sites that wait for no more."""
        for site in self._of_bucket.get(index, ()):
            if site.in_backward and all(self._step.is_complete(bucket) for bucket in site.buckets):
                self._leave_backward(site)

    def end_pass(self) -> None:
        """The backward pass is over."""
        for sites in self._of_bucket.values():
            for site in sites:
                self._leave_backward(site)
        while self._loose:
            self._gathering.drop(self._loose.pop())

    def on_update(self) -> None:
        """Parameters have changed: what autograd saved before must not be used any more."""
        self._updates += 1

    def demand(self, buckets: Iterable[int]) -> bool:
        """Make buckets whole for an operation on a sharded parameter; False outside of forward and backward passes."""
        if self._calls:
            call = self._calls[-1]
            for index in buckets:
                if index not in call.site.buckets:
                    log.debug("%s uses bucket %d of other modules; it is gathered with it now", call.site.name, index)
                    call.site.buckets.append(index)
                    self._of_bucket.setdefault(index, []).append(call.site)
                self._hold(call, index)
            return True
        if self._step.in_pass:
            for index in buckets:
                self._gathering.hold(index)
                self._loose.append(index)
            return True
        return False

    # Forward.

    def _hook(self, part: nn.Module, site: Site) -> Iterable[Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            call = Call(site)
            self._calls.append(call)
            for index in site.buckets:
                self._hold(call, index)
            if torch.is_grad_enabled():
                for leaf in tree_leaves((args, kwargs)):
                    if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                        leaf.register_hook(lambda gradient: self._leave_backward(site))  # type: ignore[no-untyped-call]
                call.hooks = self._enter_hooks()

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self._calls or self._calls[-1].site is not site:
                return  # the forward raised before `before` ran
            call = self._calls.pop()
            if call.hooks is not None:
                call.hooks.__exit__(None, None, None)
            if torch.is_grad_enabled():
                for leaf in tree_leaves(output):
                    if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                        leaf.register_hook(lambda gradient: self._enter_backward(site))  # type: ignore[no-untyped-call]
            for index in reversed(call.held):
                self._gathering.drop(index)

        yield part.register_forward_pre_hook(before, with_kwargs=True)
        yield part.register_forward_hook(after, with_kwargs=True, always_call=True)

    def _hold(self, call: Call, index: int) -> None:
        self._gathering.hold(index, learn=torch.is_grad_enabled())
        call.held.append(index)

    # Backward.

    def _enter_backward(self, site: Site) -> None:
        if not site.in_backward:
            site.in_backward = True
            for index in site.buckets:
                self._gathering.hold(index)

    def _leave_backward(self, site: Site) -> None:
        if site.in_backward:
            site.in_backward = False
            for index in reversed(site.buckets):
                self._gathering.drop(index)

    def _enter_hooks(self) -> saved_tensors_hooks | None:
        """Put our hooks over those in force, unless ours are in force already."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is not None and getattr(outer[0], "_polyaccel_sites", None) is self:
            return None
        hooks = self._make_hooks(outer)
        hooks.__enter__()
        return hooks

    def _make_hooks(self, outer: Sequence[Callable[[Any], Any]] | None) -> saved_tensors_hooks:
        def pack(tensor: Tensor) -> Any:
            index = self._storages.get(tensor.untyped_storage().data_ptr())
            if index is None or not self._gathering.is_whole(index):
                return outer[0](tensor) if outer else tensor
            full = self._gathering.full(index).raw
            if tensor.dtype is not full.dtype:  # a reinterpreted view, whose elements count otherwise
                return tensor.clone()
            offset = tensor.storage_offset() - full.storage_offset()
            return SavedView(index, offset, tensor.size(), tensor.stride(), self._updates)

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, SavedView):
                return self._restore(saved)
            if outer is None or isinstance(saved, Tensor):
                return saved  # type: ignore[no-any-return]
            return outer[1](saved)  # type: ignore[no-any-return]

        pack._polyaccel_sites = self  # type: ignore[attr-defined]
        return saved_tensors_hooks(pack, unpack)

    def _restore(self, saved: SavedView) -> Tensor:
        if saved.update != self._updates:
            raise ShardingError(
                "a parameter needed for this backward pass was updated since its forward pass",
                cure="call backward before engine.step(), once for each forward",
            )
        if not self._gathering.is_whole(saved.bucket):
            self._gathering.hold(saved.bucket)
            self._loose.append(saved.bucket)
        full = self._gathering.full(saved.bucket).raw
        return full.as_strided(saved.size, saved.stride, full.storage_offset() + saved.offset)  # type: ignore[no-any-return]
