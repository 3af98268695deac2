"""The blocks of a model recomputed without its doing: found by structure, run as regions, and chosen within a limit.

[Note: Recomputation inside hooks]
A block's `forward` is what runs again, not its call. So hooks on the block, those that gather sharded parameters among
them, stay outside and run once. Parameters that autograd keeps for the recomputed operations are replaced by notes both
times (`saved_tensor_hooks`), so that none is looked for in memory that has gone to another block. Layers of Hugging
Face's recompute themselves by a function that they are given, and first drop caches that a second run would fill once
more; they are given ours. Some of their models drop the caches themselves, so the models around these layers get it
too.

[Note: Activation memory trial]
With a limit, the first pass is recomputed whole, and what would have been kept is counted meanwhile: it needs the least
memory that there is. The choice holds for passes whose inputs are nowhere larger; a larger one is another trial. It
follows from shapes alone, so that ranks with equal shapes make the same choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Communicator
from polyaccel.engine.policies.modules import RecomputePolicy
from polyaccel.errors import ConfigError, Problem
from polyaccel.observability.traces.recorder import RunTrace
from polyaccel.planner.recomputation import Level, PassCosts, choose_levels, describe
from polyaccel.torch.activation_checkpointing.block_calls import (
    ChangedModule,
    ModelOfBlocks,
    RecomputedBlock,
    models_around,
)
from polyaccel.torch.activation_checkpointing.measuring import PassRecorder
from polyaccel.torch.activation_checkpointing.operations import DEFAULT, contexts_for, kept_operations
from polyaccel.torch.activation_checkpointing.plans import ModulePlans
from polyaccel.torch.activation_checkpointing.regions import (
    ActiveRegions,
    RecomputedRegions,
    RunOptions,
    configured,
    is_inside_region,
)
from polyaccel.torch.profiling.kineto import span_again
from polyaccel.torch.sharding.units import find_blocks

log = getLogger(__name__)

Shapes = tuple[torch.Size, ...]
_RUNS_BEFORE_JOINING = 2


class Recomputation:
    """An engine's part: regions that `module` marks itself, and its blocks if `policy` is on, under one policy; None
    leaves all that to the model.

    `along` gives the ranks along axes of the mesh; those along "tensor" compute with the same inputs. Raises
    ConfigError as `RecomputedBlocks` does.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: RecomputePolicy | None,
        accelerator: Accelerator,
        along: Callable[[Collection[str]], Communicator],
        saved_tensor_hooks: Callable[[], saved_tensors_hooks | None],
        trace: RunTrace | None = None,
    ) -> None:
        self.blocks: RecomputedBlocks | None = None
        self._active: ActiveRegions | None = None
        if policy is not None:
            ranks = along(("tensor",)) if policy.partition else None
            regions = RecomputedRegions(policy, accelerator, ranks, ModulePlans())
            self._active = ActiveRegions(regions, expects=not policy.recomputes_blocks)
            if policy.recomputes_blocks:
                self.blocks = RecomputedBlocks(module, policy, regions, saved_tensor_hooks)
                self.blocks.trace = trace
                self.blocks.has_collectives = along(("tensor", "sequence", "expert")).world_size > 1

    def forward_pass(self, *inputs: Any) -> AbstractContextManager[None]:
        """Around a forward pass of the module on `inputs`."""
        return nullcontext() if self._active is None else self._around(self._active, inputs)

    @contextmanager
    def _around(self, active: ActiveRegions, inputs: Any) -> Iterator[None]:
        around = nullcontext() if self.blocks is None else self.blocks.forward_pass(inputs)
        with active.active(), around:
            yield

    def compile(self, *args: Any, **named: Any) -> None:
        """Compile the blocks for their runs between graphs, with these arguments of `torch.compile`."""
        if self.blocks is not None:
            self.blocks.compile_options = args, named

    def release(self) -> None:
        """Give the blocks back as they were."""
        if self.blocks is not None:
            self.blocks.release()


class RecomputedBlocks:
    """The blocks of `module`, recomputed by `regions` under `policy`. `saved_tensor_hooks` as for `RunOptions`.

    Raises ConfigError for a module in which no blocks are found, and for names that mean nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: RecomputePolicy,
        regions: RecomputedRegions,
        saved_tensor_hooks: Callable[[], saved_tensors_hooks | None],
    ) -> None:
        self._module = module
        self._policy = policy
        self._regions = regions
        self._kept = kept_operations(policy.keep or (DEFAULT if policy.memory_limit is not None else ()))
        contexts = contexts_for(self._kept) if self._kept else None
        usual = Level.OPERATIONS if policy.keep else Level.NOTHING
        self._usual = usual
        self._ways = {
            Level.NOTHING: RunOptions(reentrant=policy.reentrant, saved_tensor_hooks=saved_tensor_hooks),
            Level.OPERATIONS: RunOptions(contexts=contexts, saved_tensor_hooks=saved_tensor_hooks),
        }
        moves = regions.store is not None and regions.store.moves
        self._suits_graphs = policy.memory_limit is None and not (self._kept or moves or policy.reentrant)
        self._unchanged: Counter[str] = Counter()
        """Runs in a row in which each block changed nothing, of those between graphs."""
        self.has_collectives = False
        self.compile_options: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.joins_graphs = False
        self._saved_tensor_hooks = saved_tensor_hooks
        self.trace: RunTrace | None = None
        """The record of each block that is computed again."""
        self._recorder: PassRecorder | None = None
        """That of the trial under way."""
        self._choices: list[tuple[Shapes, dict[tuple[str, int], Level]]] = []
        """What was chosen for passes whose inputs are nowhere larger than these."""
        self._levels: dict[tuple[str, int], Level] = {}
        """The level of each call of a block in the present pass, by the number of calls of the block before."""
        self._counts: Counter[str] = Counter()
        self.costs: PassCosts | None = None
        """What the last trial has found."""
        self._blocks = find_blocks(module, policy.names)
        if not self._blocks:
            raise ConfigError([_no_blocks(policy)])
        self._installed: list[ChangedModule] = [
            RecomputedBlock(self, name, block) for name, block in self._blocks.items()
        ]
        self._installed += [ModelOfBlocks(around) for around in models_around(module, self._blocks)]

    @property
    def names(self) -> tuple[str, ...]:
        """The full names of the blocks."""
        return tuple(self._blocks)

    @property
    def levels(self) -> tuple[Level, ...]:
        """What was chosen for the calls of the present pass, or the last one."""
        return tuple(self._levels.values())

    def release(self) -> None:
        """Give the blocks back as they were."""
        for installed in self._installed:
            installed.release()
        self._installed.clear()

    def forward_pass(self, inputs: Any) -> AbstractContextManager[None]:
        """Around a forward pass of the module on `inputs`."""
        return self._limited(inputs) if self._policy.memory_limit is not None else self._counted()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._counts.clear()
        yield

    @contextmanager
    def _limited(self, inputs: Any) -> Iterator[None]:
        """With the choice for these inputs, or in a trial. See [Note: Activation memory trial]."""
        self._counts.clear()
        shapes = tuple(leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        found = next((levels for measured, levels in self._choices if _is_within(shapes, measured)), None)
        hooks_refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
        if found is not None or not torch.is_grad_enabled() or hooks_refused or is_inside_region():
            self._levels = found or {}
            yield
            return
        self._levels = {}
        self._recorder = recorder = PassRecorder(self._module, self._kept)
        try:
            with recorder.whole_pass():
                yield
        finally:
            self._recorder = None
        self._choose(shapes, recorder.costs())

    def _choose(self, shapes: Shapes, costs: PassCosts) -> None:
        limit = self._policy.memory_limit
        assert limit is not None  # else there is no trial
        self.costs = costs
        allowed = set(Level) - ({Level.OPERATIONS} if self._policy.reentrant else set())
        levels = choose_levels(costs, limit, allowed)
        counts: Counter[str] = Counter()
        chosen: dict[tuple[str, int], Level] = {}
        for call, level in zip(costs.calls, levels, strict=True):
            chosen[call.name, counts[call.name]] = level
            counts[call.name] += 1
        self._choices.append((shapes, chosen))
        self._levels = chosen
        log.info("activation checkpointing: %s", describe(costs, levels, _megabytes))

    def run(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        named: dict[str, Any],
        *,
        is_observed: bool = False,
    ) -> Any:
        """One call of the block `name`, whose forward is `function`; `is_observed`: between compiled graphs."""
        if not torch.is_grad_enabled() or is_inside_region():
            return function(*args, **named)
        key = (name, self._counts[name])
        self._counts[name] += 1
        regions = configured()[0] if configured() else self._regions
        if self._recorder is not None:
            recorder = self._recorder
            way = RunOptions(
                saved_tensor_hooks=self._saved_tensor_hooks, first=lambda values: recorder.call(name, values)
            )
            return regions.run(function, args, named, way)
        level = self._levels.get(key, self._usual)
        if level is Level.EVERYTHING:
            return function(*args, **named)
        way = self._ways[level]
        if self.trace is not None and self.trace.is_on:
            way = replace(way, again=partial(span_again, name, self.trace))
        if is_observed and self._suits_graphs and not self.has_collectives:
            way = replace(way, report=partial(self._observe, name))
        return regions.run(function, args, named, way)

    def _observe(self, name: str, is_changed: bool) -> None:
        self._unchanged[name] = 0 if is_changed else self._unchanged[name] + 1
        self.joins_graphs = all(self._unchanged[block] >= _RUNS_BEFORE_JOINING for block in self._blocks)


def _is_within(shapes: Shapes, measured: Shapes) -> bool:
    return len(shapes) == len(measured) and all(
        len(one) == len(other) and all(size <= most for size, most in zip(one, other, strict=True))
        for one, other in zip(shapes, measured, strict=True)
    )


def _no_blocks(policy: RecomputePolicy) -> Problem:
    key = "activation_checkpointing.blocks"
    if policy.names:
        return Problem(key, list(policy.names), "no module of the model has this class or name", "look at print(model)")
    expected = "the model has no list of modules of one class to recompute"
    return Problem(
        key, [], expected, "name modules by class or full name, or leave activation_checkpointing.enabled out"
    )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MB"
