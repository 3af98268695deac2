"""`Rewrite`: one change that the engine makes to a user's model, and `RewriteContext`, what it is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Communicator
from polyaccel.engine.counters import StepCounters
from polyaccel.engine.rewrites import AppliedRewrite, BaseContext, BaseRewrite
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.torch.activation_checkpointing.blocks import Recomputation
from polyaccel.torch.api.optimizer import ParamGroups
from polyaccel.torch.linears import Linears
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.torch.pipeline.stage_module import cut_of
from polyaccel.torch.settings import ModuleSettings
from polyaccel.zero.update.optimizers import SliceOptimizer

__all__ = ["AppliedRewrite", "OptimizerLike", "RewritableEngine", "Rewrite", "RewriteContext"]

OptimizerLike = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


class RewritableEngine(Protocol):
    """An engine under construction, as the rewrites that need one see it."""

    accelerator: Accelerator
    communicator: Communicator
    counters: StepCounters
    linears: Linears
    recomputation: Recomputation | None

    def saved_tensor_hooks(self) -> saved_tensors_hooks | None:
        """Hooks that replace sharded parameters among saved tensors."""

    def shard_parameters(self) -> tuple[str, ...]:
        """Lay the model's parameters out in buckets; returns their names. Collective."""

    def unshard_parameters(self) -> None:
        """Give the parameters memory of their own again. Collective where they are sharded."""


@dataclass(kw_only=True)
class RewriteContext(BaseContext):
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


class Rewrite(BaseRewrite[RewriteContext]):
    """One kind of change to a torch module, in place."""
