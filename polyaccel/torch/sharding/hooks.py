"""Where sharded parameters are gathered: around the forward and the backward of the modules that use them.

What a module uses here is this rank's affair: `ZeroEngine.uses` makes gathers of it in which all ranks take part,
whichever of them run the module too ([Note: Schedule of unshard events]).

[Note: Forward hooks]
A *site* is a module and the buckets that it needs: a unit with all its parameters, or a module outside of the units
with its own. Before its forward the buckets are held, after it they are dropped, also when it raised.

[Note: Backward hooks]
The gradient of a site's output means that its backward begins: the buckets are held, and every site neither
around nor inside it is over. For autograd runs later operations first, hence nothing of an earlier begun site is left
when another begins. What gradients arrive, and when, has no say in it: ranks that run the same modules shall report the
same uses in the same order, or they gather for each other what no rank needs. A site whose calls have all run backward
will see no more gradients, so the reductions of its buckets are launched then. Should an order of events be stranger
than that, a weight is gathered because autograd asks for it (see [Note: Saved tensors by reference]), and a gradient is
late: slower, never wrong.

[Note: Function transforms]
`torch.func.grad` and its like refuse to begin where hooks on saved tensors are in force. So a site without buckets of
its own puts none in force, and its forward may call them. What is gathered inside a transform, or where no hooks are in
force, stays whole until the backward pass ends.

[Note: Rollouts unit by unit]
Ranks that generate end at different tokens, so they run different numbers of forward passes. A rollout is one outermost
call around all of them (`one_pass`): each bucket is gathered by voting, and a rank that has ended gathers what the
others still ask for, without computing (transformers' `synced_gpus` runs the model on for that). All meet at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from polyaccel.core.buffer import Buffer
from polyaccel.torch.sharding.saved_views import SavedViews
from polyaccel.torch.sharding.sharded import EngineHook
from polyaccel.torch.sharding.transforms import innermost, is_transforming, outside_transforms
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.plan.gather_schedule import SyncPoint

log = getLogger(__name__)

_apart: ContextVar[bool] = ContextVar("polyaccel_apart_from_passes", default=False)


@contextmanager
def apart_from_passes() -> Iterator[None]:
    """Graphs that are built inside get their gradients inside too. See [Note: Loss gradients in forward]."""
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


@dataclass(eq=False)
class HookedModule:
    """A module and the sharded buckets that it needs. `calls` count forwards whose backward is to come, `entries` the
    backwards that began in this pass; `usual_entries` is their number in the last one."""

    name: str
    module: nn.Module
    buckets: list[int]
    held: list[int] | None = None
    """The buckets that are held for the backward under way; None outside."""
    calls: int = 0
    entries: int = 0
    usual_entries: int = 0
    runs_transforms: bool = False
    """Its forward runs parts of it inside `torch.func`'s transforms. See [Note: Function transforms]."""

    @property
    def is_over(self) -> bool:
        """Whether no more gradients are expected of it in this pass."""
        return self.held is None and self.entries >= max(self.calls, self.usual_entries)

    def is_around(self, other: HookedModule) -> bool:
        return self.name == "" or other.name.startswith(f"{self.name}.")


@dataclass(eq=False)
class Call:
    """A site whose forward is running, or has run; `held` is what will be dropped after it."""

    site: HookedModule
    held: list[int] = field(default_factory=list)
    hooks: saved_tensors_hooks | None = None
    has_entered: bool = False
    """Its backward has begun."""
    is_apart: bool = False
    """All that it can use is gathered already, for example by `GatheredParameters`, if it is an outermost call: each
    rank may run it as often as it likes."""
    learns: bool = False
    """It is part of a training step, if it is an outermost call: the course of the next one has what it uses."""
    outside: BaseException | None = None
    """The exception that was being handled when it began."""
    is_rollout: bool = False
    """It stands for all forward passes of a rollout. See [Note: Rollouts unit by unit]."""


class UnshardHooks:
    """The sites of `module`, by hooks on its parts. `buckets_of` gives the sharded buckets of a part, by its full
    name. `begin` is called when the backward of a site begins."""

    def __init__(
        self, module: nn.Module, step: ZeroEngine, buckets_of: dict[str, list[int]], begin: Callable[[], None]
    ) -> None:
        self._begin = begin
        self._unsharder = step.unsharder
        self._unsharder.learns = self._trains = step.optimizer is not None
        self._reducer = step.reducer
        self._saved = SavedViews(self._unsharder)
        self._calls: list[Call] = []
        self._unfinished: list[Call] = []
        """The outermost calls whose backward needs buckets that stay unsharded until it ends."""
        self._in_backward: list[HookedModule] = []
        self._handles: list[Any] = []
        self._names = {part: name for name, part in module.named_modules()}
        self._sites: dict[nn.Module, HookedModule] = {}
        self._of_bucket: dict[int, list[HookedModule]] = {}
        for part, name in self._names.items():
            if name in buckets_of or part is module:
                self._add_site(part, buckets_of.get(name, ()))

    def _add_site(self, part: nn.Module, buckets: Iterable[int]) -> HookedModule:
        site = self._sites[part] = HookedModule(self._names[part], part, [])
        self.add_buckets(part, buckets)
        self._handles += self._hook(site)
        return site

    def add_buckets(self, part: nn.Module, buckets: Iterable[int]) -> None:
        """From now on gather `buckets` around `part` too."""
        site = self._sites.get(part) or self._add_site(part, ())
        for index in buckets:
            if index not in site.buckets:
                site.buckets.append(index)
                self._of_bucket.setdefault(index, []).append(site)

    def remove_buckets(self, part: nn.Module, buckets: Iterable[int]) -> None:
        """No longer gather `buckets` around `part`."""
        site = self._sites.get(part)
        for index in buckets:
            if site is not None and index in site.buckets:
                site.buckets.remove(index)
                self._of_bucket[index].remove(site)

    def innermost(self) -> list[nn.Module]:
        """The modules around which buckets are gathered, and inside of which none are."""
        used = [site for site in self._sites.values() if site.buckets]
        return [site.module for site in used if not any(site is not other and site.is_around(other) for other in used)]

    def release(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # What the adapter reports.

    def on_bound(self, index: int, view: Buffer) -> None:
        """A parameter of a bucket was given values in `view`."""
        self._saved.on_bound(index, view)

    def on_freed(self, index: int) -> None:
        """A bucket is sharded again."""
        self._saved.on_freed(index)

    def on_update(self) -> None:
        """Parameters have changed: graphs built on the old values are of no use."""
        self._saved.on_update()

    def end_backward(self, is_whole: bool) -> None:
        """The backward pass is over (`is_whole`), or given up."""
        while self._in_backward:
            self._leave(self._in_backward[-1])
        self._unfinished = [call for call in self._unfinished if not call.has_entered]
        if not self._unfinished:
            self._unsharder.reshard_rest()
        for site in self._sites.values():
            site.usual_entries, site.entries, site.calls = site.entries, 0, 0
        if is_whole:
            self._unsharder.sync(SyncPoint.BACKWARD)
        else:
            self._unsharder.abandon()

    def before_update(self) -> None:
        """Parameters are about to change: graphs that wait for their backward will be of no use."""
        self._unfinished.clear()
        self._unsharder.reshard_rest()

    def try_unshard(self, buckets: Iterable[int]) -> bool:
        """Make buckets whole for an operation on a sharded parameter; False outside of forward and backward passes."""
        if self._calls:
            call = self._calls[-1]
            for index in buckets:
                if index not in call.site.buckets and not call.is_rollout:
                    log.debug("%s uses bucket %d of other modules; it is gathered with it now", call.site.name, index)
                    self.add_buckets(call.site.module, [index])
                    self._unsharder.will_change_order()
                self._hold(call, [index])
            return True
        if self._reducer.in_backward:
            with outside_transforms():
                for index in buckets:
                    self._unsharder.unshard_until_end(index)
            return True
        return False

    def saved_tensor_hooks(self) -> saved_tensors_hooks | None:
        """Replace gathered parameters by notes in graphs that are built from now on; the caller leaves the hooks."""
        return self._saved.enter() if torch.is_grad_enabled() else None

    # Forward.

    def _hook(self, site: HookedModule) -> Iterable[Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is not site.module:  # a copy of the module, which took the hooks along
                return
            learns = self._trains and (torch.is_grad_enabled() or self._reducer.in_backward)
            call = Call(site, learns=learns, outside=sys.exc_info()[1])
            if self._is_outermost and self._unsharder.are_unsharded(self._inside(site)):
                call.is_apart, call.learns = True, False
            if not self._calls:
                self._unsharder.learns = call.learns
            self._calls.append(call)
            if is_transforming():
                for outer in self._calls[:-1]:
                    outer.site.runs_transforms = True
            elif torch.is_grad_enabled() and site.buckets and not site.runs_transforms:
                call.hooks = self._saved.enter()
            self._hold(call, site.buckets)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self._calls or self._calls[-1].site is not site or module is not site.module:
                return  # the forward raised before `before` ran
            call = self._calls.pop()
            if call.hooks is not None:
                call.hooks.__exit__(None, None, None)
            with outside_transforms():
                if torch.is_grad_enabled():
                    self._watch(call, output)
                for index in reversed(call.held):
                    self._unsharder.reshard(index)
                if self._is_outermost and not call.is_apart:
                    self._end_forward(call)
                if not self._calls:
                    self._unsharder.learns = self._trains

        yield site.module.register_forward_pre_hook(EngineHook(before), with_kwargs=True)
        yield site.module.register_forward_hook(EngineHook(after), with_kwargs=True, always_call=True)

    @property
    def _is_outermost(self) -> bool:
        """Whether no call is under way, nor a backward pass, which may run calls again."""
        return not self._calls and not self._reducer.in_backward and not self._in_backward

    def _inside(self, site: HookedModule) -> Iterable[int]:
        """The buckets that a call of `site` may use."""
        return (
            index for other in self._sites.values() if site.is_around(other) or other is site for index in other.buckets
        )

    def _end_forward(self, call: Call) -> None:
        """End an outermost call; after an error other ranks are not waited for."""
        if sys.exc_info()[1] is not call.outside:
            self._unsharder.abandon()
        else:
            self._unsharder.sync(SyncPoint.FORWARD if call.learns else SyncPoint.EVALUATION)

    def _hold(self, call: Call, buckets: Iterable[int]) -> None:
        """Hold buckets until the call ends, or the backward pass, should autograd keep the parameters themselves."""
        has_notes = not is_transforming() and any(one.hooks is not None for one in self._calls)
        stays = torch.is_grad_enabled() and not has_notes
        with outside_transforms():
            for index in buckets:
                self._unsharder.unshard(index)
                call.held.append(index)
                if stays and not self._unsharder.stays(index):
                    self._unsharder.unshard_until_end(index)
                    self._unfinished.append(self._calls[0])

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Let all forward passes inside be one: ranks may run different numbers of them, and wait for each other only
        at the end. Collective. See [Note: Rollouts unit by unit]."""
        if not self._is_outermost:  # part of the pass that is under way
            yield
            return
        call = Call(HookedModule("", nn.Identity(), []), is_rollout=True)
        self._unsharder.learns = False
        self._unsharder.gather_exactly(exact=True)
        self._calls.append(call)
        try:
            yield
            self._end_rollout(call)
            self._unsharder.sync(SyncPoint.EVALUATION)
        except BaseException:
            self._end_rollout(call)
            self._unsharder.abandon()
            raise
        finally:
            self._unsharder.learns = self._trains
            self._unsharder.gather_exactly(exact=False)

    def _end_rollout(self, call: Call) -> None:
        """Release what operations between forward passes use, once."""
        if call in self._calls:
            self._calls.remove(call)
            for index in reversed(call.held):
                self._unsharder.reshard(index)

    # Backward.

    def _watch(self, call: Call, output: Any) -> None:
        """Notice when the backward of `call` begins."""
        if _apart.get():
            return
        leaves = [innermost(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        watched = [leaf for leaf in leaves if leaf.requires_grad and leaf.grad_fn is not None]
        for leaf in watched:
            leaf.register_hook(lambda gradient: self._enter(call))  # type: ignore[no-untyped-call]
        if watched and not self._reducer.in_backward:  # else it is a recomputation, whose call is counted already
            call.site.calls += 1

    def _enter(self, call: Call) -> None:
        """The backward of `call` begins, unless it has begun already. See [Note: Backward hooks]."""
        self._begin()
        site = call.site
        for other in self._in_backward[::-1]:
            if other is not site and not other.is_around(site) and not site.is_around(other):
                self._leave(other)
        if not call.has_entered:
            call.has_entered = True
            site.entries += 1
        if site.held is None:
            site.held = []
            self._in_backward.append(site)
            for index in list(site.buckets):
                self._unsharder.unshard(index)
                site.held.append(index)

    def _leave(self, site: HookedModule) -> None:
        """The backward of `site` is over, as far as it has begun."""
        held, site.held = site.held or [], None
        self._in_backward.remove(site)
        for index in reversed(held):
            self._unsharder.reshard(index)
        for index in held:
            if all(one.is_over for one in self._of_bucket[index]):
                self._unsharder.release(index)
