"""Layers that are quantised or pruned while they train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from polyaccel.comm.base import Communicator
from polyaccel.engine.policies.compression import compression_policy_of
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.torch.compression.cut_layers import CutLayer
from polyaccel.torch.compression.formulas import TERNARY
from polyaccel.torch.compression.layers import CompressedLayer, compressed_layers
from polyaccel.torch.compression.models import compress
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.torch.rewrites.base import AppliedRewrite, Rewrite, RewriteContext
from polyaccel.torch.sharding.tensor_shard import TensorShard, cuts_of
from polyaccel.torch.tensor_parallel.layers import CachedInput, ColumnLayer, RowLayer


class CompressedLayers(Rewrite):
    """The layers that `compress_first` has compressed, for the list of what was changed: their scores are parameters,
    so that it comes first.
    """

    name = "compression_training"

    def is_on(self, context: RewriteContext) -> bool:
        return is_compressed(context.model)

    def check(self, context: RewriteContext) -> None:
        """Raise ConfigError for meshes and settings that do not go with it."""
        require_mesh(context.model, context.runtime)

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        names = tuple(name for name, part in context.model.named_modules() if isinstance(part, CompressedLayer))
        return AppliedRewrite(name=self.name, modules=names)


def is_compressed(model: nn.Module) -> bool:
    """Whether a model has compressed layers."""
    return any(isinstance(part, CompressedLayer) for part in model.modules())


def require_mesh(model: nn.Module, runtime: EngineBuilder) -> None:
    """Raise ConfigError for meshes and settings that do not go with compressed layers."""
    config, policy = runtime.config, compression_policy_of(runtime.config)
    has_tensor, shares_tokens = runtime.mesh.has_several("tensor"), config.tensor_parallel.sequence_sharded
    problems = list[Problem]()
    if config.tiled_compute.enabled:
        expected = "replaces layers that are compressed"
        problems.append(Problem("tiled_compute.enabled", True, expected, "leave it out"))
    if has_tensor and _cuts_itself(model):
        expected = "has blocks of weights before they are compressed"
        problems.append(Problem("mesh.tensor", type(model).__name__, expected, "give a model that is whole"))
    has_stages = runtime.mesh.has_several("pipe")
    if has_stages and isinstance(model, PipelineModule):
        expected = "has the layers of one stage before they are compressed"
        problems.append(Problem("mesh.pipe", type(model).__name__, expected, "give an nn.Sequential of all layers"))
    if (has_tensor or has_stages) and policy.curvature is not None:
        expected = "needs all blocks on each rank, and whole"
        problems.append(Problem("eigenvalue.enabled", True, expected, "leave it out there"))
    if has_stages and any(rule.removal is not None for rule in policy.pruning):
        key, expected = "sparse_pruning.shared_parameters.method", "compares blocks of all stages in each step"
        problems.append(Problem(f"compression_training.{key}", "snip_momentum", expected, 'use "l1" or "topk"'))
    if has_tensor and shares_tokens and any(rule.is_static for rule in policy.inputs):
        key, expected = "tensor_parallel.sequence_sharded", "gives ranks other tokens, and a static range is one of all"
        problems.append(Problem(key, True, expected, 'leave it out, or use "range_calibration": "dynamic"'))
    if problems:
        raise ConfigError(problems)


def _cuts_itself(model: nn.Module) -> bool:
    return bool(cuts_of(model)) or any(getattr(one, "tensor_model_parallel", False) for one in model.parameters())


def require_one_stage(layers: Mapping[str, nn.Module], stage_of: Callable[[str], int | None]) -> None:
    """Raise ConfigError for layers that follow one of another stage; `stage_of` gives that of a layer's name."""
    problems = []
    for name, layer in layers.items():
        if not isinstance(layer, CompressedLayer):
            continue
        layer.compression.is_of_part = True
        for mask, _ in layer.compression.followed:
            pruned = mask.layer.compression.name
            if stage_of(pruned) is None or stage_of(pruned) != stage_of(name):
                expected = f"follows {pruned!r}, which may be on another stage"
                problems.append(Problem(f"{mask.rule.key}.related_modules", name, expected, "prune within a block"))
    if problems:
        raise ConfigError(problems)


def follow_cuts(model: nn.Module, ranks: Communicator) -> None:
    """Let compressed layers know which blocks of their weights this rank has. Collective.

    Raises ConfigError for inputs in 2 bits of which ranks have parts: their levels need a mean of all.
    """
    problems = []
    for name, layer in compressed_layers(model):
        layer.compression.is_of_part = True
        cuts: Mapping[str, TensorShard] = getattr(layer, "parallel_cuts", None) or {}
        if "weight" not in cuts:
            continue
        how, splits = layer.compression, isinstance(layer, RowLayer) and layer.share.sizes is None
        bias = cuts["bias"].block if "bias" in cuts else None
        how.cut = CutLayer(cuts["weight"].block, bias, ranks, splits_inputs=splits)
        if how.inputs is None:
            continue
        if isinstance(layer, ColumnLayer):
            layer.share.input = CachedInput()  # layers with one input get separate tensors
        if splits and not how.inputs.is_static and how.inputs.bits == TERNARY:
            expected = f"gives the inputs of {name!r} a mean over features that tensor ranks share"
            problems.append(Problem(f"{how.inputs.key}.bits", how.inputs.bits, expected, "use 3 bits or more"))
    if problems:
        raise ConfigError(problems)


def compress_first(
    model: nn.Module, runtime: EngineBuilder, client: Any, model_parameters: Iterable[Any] | None
) -> None:
    """Compress what the config names, unless the script has done so. Raises as `compress` and `require_mesh`, and
    PolyaccelError where scores would be parameters that the script's optimizer does not have."""
    policy = compression_policy_of(runtime.config)
    if not (policy.has_rules or policy.curvature) or is_compressed(model):
        return
    require_mesh(model, runtime)
    is_chosen = isinstance(client, torch.optim.Optimizer) or model_parameters is not None
    if is_chosen and any(rule.is_learned for rule in policy.pruning):
        raise PolyaccelError(
            'pruning by "topk" adds scores, and the parameters to train were chosen before',
            hint="call polyaccel.init_compression(model, config) before they are chosen",
            value="topk",
        )
    compress(model, policy)
