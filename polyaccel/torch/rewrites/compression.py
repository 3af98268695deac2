"""Layers that are quantised or pruned while they train."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from polyaccel.engine.policies.compression import compression_policy_of
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.torch.compression.layers import CompressedLayer
from polyaccel.torch.compression.models import compress
from polyaccel.torch.rewrites.base import AppliedRewrite, Rewrite, RewriteContext


class CompressedLayers(Rewrite):
    """The layers that `compress_first` has compressed, for the list of what was changed: their scores are parameters,
    so that it comes first.
    """

    name = "compression_training"

    def is_on(self, context: RewriteContext) -> bool:
        return is_compressed(context.model)

    def check(self, context: RewriteContext) -> None:
        """Raise ConfigError for models that are cut over ranks: their layers hold blocks of weights."""
        require_uncut(context.runtime)

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        names = tuple(name for name, part in context.model.named_modules() if isinstance(part, CompressedLayer))
        return AppliedRewrite(name=self.name, modules=names)


def is_compressed(model: nn.Module) -> bool:
    """Whether a model has compressed layers."""
    return any(isinstance(part, CompressedLayer) for part in model.modules())


def require_uncut(runtime: EngineBuilder) -> None:
    """Raise ConfigError for models that are cut over ranks: their layers hold blocks of weights."""
    problems = [
        Problem(f"mesh.{axis}", size, "cuts layers, and compressed ones stay whole", "use 1")
        for axis in ("tensor", "pipe", "expert")
        if (size := runtime.mesh.size_of((axis,))) > 1
    ]
    if runtime.config.tiled_compute.enabled:
        expected = "replaces layers that are compressed"
        problems.append(Problem("tiled_compute.enabled", True, expected, "leave it out"))
    if problems:
        raise ConfigError(problems)


def compress_first(
    model: nn.Module, runtime: EngineBuilder, client: Any, model_parameters: Iterable[Any] | None
) -> None:
    """Compress what the config names, unless the script has done so. Raises as `compress` and `require_uncut`, and
    PolyaccelError where scores would be parameters that the script's optimizer does not have."""
    policy = compression_policy_of(runtime.config)
    if not (policy.has_rules or policy.curvature) or is_compressed(model):
        return
    require_uncut(runtime)
    is_chosen = isinstance(client, torch.optim.Optimizer) or model_parameters is not None
    if is_chosen and any(rule.is_learned for rule in policy.pruning):
        raise PolyaccelError(
            'pruning by "topk" adds scores, and the parameters to train were chosen before',
            hint="call polyaccel.init_compression(model, config) before they are chosen",
            value="topk",
        )
    compress(model, policy)
