"""`Rewrite`: one change that the engine makes to a user's model, and `RewriteContext`, what it is made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Communicator
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.torch.activation_checkpointing.blocks import Recomputation
from polyaccel.torch.api.optimizer import ParamGroups
from polyaccel.torch.linears import Linears
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.torch.pipeline.stage_module import cut_of
from polyaccel.torch.settings import ModuleSettings
from polyaccel.zero.update.optimizers import SliceOptimizer

log = getLogger(__name__)

OptimizerLike = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedRewrite:
    """One rewrite of a model, as it was applied on this rank."""

    name: str
    """The section of the config that asks for it."""
    modules: tuple[str, ...] = ()
    """Full names of the modules whose class, forward or attributes it replaced."""
    parameters: tuple[str, ...] = ()
    """Full names of the parameters whose values it cut, moved or flattened."""
    unproven: tuple[str, ...] = ()
    """Full names of the modules that it changed without a comparison with what they were."""
    remove: Callable[[], object] | None = None
    """Undoes it; None where this rank no longer has what was before, as after a cut of parameters."""
    is_collective: bool = False
    """Whether every rank has to call `remove`."""


class RewritableEngine(Protocol):
    """An engine under construction, as the rewrites that need one see it."""

    accelerator: Accelerator
    communicator: Communicator
    linears: Linears
    recomputation: Recomputation | None

    def saved_tensor_hooks(self) -> saved_tensors_hooks | None:
        """Hooks that replace sharded parameters among saved tensors."""

    def shard_parameters(self) -> tuple[str, ...]:
        """Lay the model's parameters out in buckets; returns their names. Collective."""

    def unshard_parameters(self) -> None:
        """Give the parameters memory of their own again. Collective where they are sharded."""


@dataclass(kw_only=True)
class RewriteContext:
    """What rewrites read, and what they leave for the engine."""

    model: nn.Module
    """The user's model; a `PipelineModule` of its layers where it was a list of them."""
    runtime: EngineBuilder
    settings: ModuleSettings
    client: OptimizerLike | None = None
    """The optimizer that the script gave, or a function that makes it."""
    model_parameters: Iterable[Any] | None = None
    slice_optimizers: Mapping[str, Callable[[], SliceOptimizer]] = field(default_factory=dict)
    has_own_mesh: bool = False
    """Whether the script brought its groups along (`mpu`, `mesh_param`), and cuts sequences itself."""
    slice_optimizer: SliceOptimizer | None = None
    groups: ParamGroups = field(default_factory=list)
    engine: RewritableEngine | None = None
    """The engine, for the rewrites that come after it was made."""
    applied: list[AppliedRewrite] = field(default_factory=list)
    """What was applied, in order."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.runtime.communicator.rank

    @property
    def is_staged(self) -> bool:
        """Whether the model is one stage of a pipeline."""
        return isinstance(self.model, PipelineModule) or cut_of(self.model) is not None

    def size_of(self, axis: str) -> int:
        """The number of ranks along `axis` of the mesh."""
        return self.runtime.mesh.size_of((axis,))

    def apply(self, rewrites: Sequence[Rewrite]) -> None:
        """Check all of `rewrites` that are on, then apply them in order. Collective."""
        for one in rewrites:
            if one.is_on(self):
                one.check(self)
        for one in rewrites:
            if one.is_on(self) and (done := one.apply(self)) is not None:
                self.applied.append(done)
                log.debug("%s: %d modules, %d parameters", done.name, len(done.modules), len(done.parameters))

    def remove(self, *, alone: bool = False) -> None:
        """Undo what can be undone, the last rewrite first. Collective, unless only what this rank can do `alone`."""
        while self.applied:
            one = self.applied.pop()
            if one.remove is not None and not (alone and one.is_collective):
                one.remove()


class Rewrite(ABC):
    """One kind of change to a user's model. It holds no state: what was changed is in `AppliedRewrite`."""

    name: ClassVar[str]
    needs_engine: ClassVar[bool] = False
    """Whether the engine applies it while it is built."""

    @abstractmethod
    def is_on(self, context: RewriteContext) -> bool:
        """Whether the run asks for it."""

    def check(self, context: RewriteContext) -> None:  # noqa: B027 - most have nothing to check
        """Raise ConfigError or PolyaccelError for a request that cannot be met, before anything is changed."""

    @abstractmethod
    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """Change the model in place; None where this rank's model has nothing to change. Collective."""
