"""Regions: calls of functions whose activations are computed again in backward instead of kept.

What is left of a region until its backward are its inputs, where its `InputStore` keeps them. Random numbers are the
same both times: those of torch's generators, and those that are drawn by name. What else a region changes is restored
around the second run (`RegionState`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Communicator
from polyaccel.engine.policies.modules import RecomputePolicy
from polyaccel.torch.activation_checkpointing.inputs import InputStore
from polyaccel.torch.activation_checkpointing.plans import ModulePlans
from polyaccel.torch.activation_checkpointing.state import RegionState

log = getLogger(__name__)

_inside: ContextVar[bool] = ContextVar("polyaccel_inside_region", default=False)


def is_inside_region() -> bool:
    """Whether a region of ours is being computed, for the first time or again."""
    return _inside.get()


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How one region is run. `reentrant`: by torch's older way, where no gradient would be lost by it.

    `contexts` makes the contexts in which torch runs it and runs it again. `saved_tensor_hooks` puts hooks on saved
    tensors in force inside, both times, and the caller leaves them. `first` is a context around the first run alone,
    `again` one around each recomputation: a variable of the region's function would be restored with the state.
    `report` gets whether the first run changed anything that is restored around the second.
    """

    reentrant: bool = False
    contexts: Callable[[], tuple[Any, Any]] | None = None
    saved_tensor_hooks: Callable[[], saved_tensors_hooks | None] | None = None
    first: Callable[[Sequence[Any]], AbstractContextManager[Any]] | None = None
    again: Callable[[], AbstractContextManager[Any]] | None = None
    report: Callable[[bool], None] | None = None


PLAIN = RunOptions()


class RecomputedRegions:
    """Runs regions on `accelerator` by `policy`. `ranks` share the model; None if none do. `count` is the number of
    regions so far. `plans`, for those of an engine, keep the modules that they are plans of."""

    def __init__(
        self,
        policy: RecomputePolicy,
        accelerator: Accelerator | None,
        ranks: Communicator | None = None,
        plans: ModulePlans | None = None,
    ) -> None:
        self.count = 0
        self._accelerator = accelerator
        self.store = None if accelerator is None else InputStore(policy, accelerator, ranks)
        self._synchronizes = policy.synchronize or policy.profile
        self._times = _Times() if policy.profile else None
        self.plans = plans

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any], way: RunOptions = PLAIN
    ) -> Any:
        """`function(*args, **named)` as a region."""
        if torch.compiler.is_compiling():
            from polyaccel.torch.run_outside_graph import run_outside_graph

            return run_outside_graph(self.run, function, args, named, way)
        self.count += 1
        if isinstance(function, partial):
            args, named = (*function.args, *args), {**function.keywords, **named}
            function = function.func
        if self._times is not None:
            self._times.begin_region()
        values = (*args, *named.values())
        call = _Call(self, function, len(args), tuple(named), way)
        if self.store is None or not self.store.moves or not torch.is_grad_enabled() or _inside.get():
            return call.begin(values)
        with self.store.region(values).hooks():
            outputs = call.begin(values)
        self.store.settle()
        return outputs

    @contextmanager
    def around(self, *, is_first: bool) -> Iterator[None]:
        """What the policy asks for around a run of a region."""
        if self._accelerator is None or not self._synchronizes:
            yield
            return
        self._accelerator.synchronize()
        begun = time.perf_counter()
        try:
            yield
        finally:  # a recomputation ends by an exception of torch's when nothing more is needed
            self._accelerator.synchronize()
            if self._times is not None:
                self._times.end_run(time.perf_counter() - begun, is_first=is_first)


class _Call:
    """One region in one forward pass: its function on positional arguments, then those called `names`."""

    def __init__(
        self,
        regions: RecomputedRegions,
        function: Callable[..., Any],
        count: int,
        names: tuple[str, ...],
        way: RunOptions,
    ) -> None:
        self._regions = regions
        self._function = function
        self._count = count
        self._names = names
        self._way = way
        self._has_run = False
        self._structure: Any = None
        self._state: RegionState | None = None
        """What the first run found; None where there will be no second."""

    def begin(self, values: Sequence[Any]) -> Any:
        """The outputs, in a graph that will compute them again."""
        if torch.is_grad_enabled():
            self._state = RegionState((self._function, *values), self._regions.plans)
        if self._way.reentrant and _suits_reentrant(values):
            flat = torch.utils.checkpoint.checkpoint(self._run_flat, *values, use_reentrant=True)
            return tree_unflatten(list(flat), self._structure)
        contexts = self._way.contexts or torch.utils.checkpoint.noop_context_fn
        return torch.utils.checkpoint.checkpoint(self._run, *values, use_reentrant=False, context_fn=contexts)

    def _run(self, *values: Any) -> Any:
        """Both times: backward may run in another thread, where context variables stand at their defaults."""
        is_first, self._has_run = not self._has_run, True
        token = _inside.set(True)
        try:
            with ExitStack() as stack:
                stack.enter_context(self._regions.around(is_first=is_first))
                if self._state is not None and not is_first:
                    stack.enter_context(self._state.rerun())
                if not is_first and self._way.again is not None:
                    stack.enter_context(self._way.again())
                if is_first and self._way.first is not None:
                    stack.enter_context(self._way.first(values))
                if (
                    notes := None if self._way.saved_tensor_hooks is None else self._way.saved_tensor_hooks()
                ) is not None:
                    stack.push(notes)
                named = dict(zip(self._names, values[self._count :], strict=True))
                outputs = self._function(*values[: self._count], **named)
            if self._state is not None and is_first:
                if self._way.report is not None:
                    self._way.report(self._state.is_changed())
                self._state.end_first_run()
            return outputs
        finally:
            _inside.reset(token)

    def _run_flat(self, *values: Any) -> tuple[Any, ...]:
        """With the outputs side by side, as torch's older way wants them."""
        leaves, self._structure = tree_flatten(self._run(*values))
        return tuple(leaves)


class _Times:
    """Seconds of regions and of their recomputations since the last backward pass."""

    def __init__(self) -> None:
        self._forward: list[float] = []
        self._again: list[float] = []

    def begin_region(self) -> None:
        """A region begins: if some were recomputed since the last one, a backward pass is over."""
        if self._again:
            log.info(
                "activation checkpointing: %d regions took %.1f ms, %d recomputations %.1f ms",
                len(self._forward),
                1e3 * sum(self._forward),
                len(self._again),
                1e3 * sum(self._again),
            )
            self._forward.clear()
            self._again.clear()

    def end_run(self, seconds: float, *, is_first: bool) -> None:
        (self._forward if is_first else self._again).append(seconds)


def _suits_reentrant(values: Sequence[Any]) -> bool:
    """Return whether reentrant checkpointing sees all gradients: tensors among arguments only."""
    if not torch.is_grad_enabled() or not any(isinstance(one, Tensor) and one.requires_grad for one in values):
        return False
    nested = (value for value in values if not isinstance(value, Tensor))
    return not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(list(nested)))


class ActiveRegions:
    """The regions of the engine whose forward is running: `with active(): ...`. `expects`: the policy is about regions
    that the model marks itself, so a model without them is logged once."""

    def __init__(self, regions: RecomputedRegions, *, expects: bool) -> None:
        self.regions = regions
        self._expects = expects

    @contextmanager
    def active(self) -> Iterator[None]:
        """Regions in this block are this engine's."""
        token = _active.set(self.regions)
        try:
            yield
        finally:
            _active.reset(token)
        if self._expects and not self.regions.count and torch.is_grad_enabled():
            self._expects = False
            log.warning(
                "activation_checkpointing.cpu_checkpointing or another key about regions is on, but the model ran no "
                "region of polyaccel.checkpointing.checkpoint, so it does nothing; "
                '"enabled": true recomputes the model\'s blocks'
            )


_active: ContextVar[RecomputedRegions | None] = ContextVar("polyaccel_regions", default=None)
_configured: list[RecomputedRegions] = []
"""The last call of `configure` in this process: one entry, or none."""
_UNCONFIGURED = RecomputedRegions(RecomputePolicy(), None)


def configured() -> list[RecomputedRegions]:
    """The regions that `configure` has made, for the whole process: one, or none."""
    return _configured


def present_regions() -> RecomputedRegions:
    """Those of `configure`, else of the engine whose forward is running, else plain ones."""
    return _configured[0] if _configured else _active.get() or _UNCONFIGURED
