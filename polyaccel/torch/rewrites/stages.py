"""Models cut over the stages of a pipeline: lists of layers, and models with one list of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.pipeline.select import chosen_placement
from polyaccel.pipeline.table import PipelineError
from polyaccel.torch.pipeline.measured_blocks import measured_blocks
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.torch.pipeline.stage_module import StageModule
from polyaccel.torch.rewrites.base import AppliedRewrite, Rewrite, RewriteContext
from polyaccel.torch.rewrites.compression import require_one_stage
from polyaccel.torch.sharding.tensor_shard import cuts_of
from polyaccel.torch.tensor_parallel.megatron_compat import cut_as_megatron_says


class PipelineLayers(Rewrite):
    """A `PipelineModule`, or an `nn.Sequential` made into one, of which this rank has the layers of its stage."""

    name = "pipeline"

    def is_on(self, context: RewriteContext) -> bool:
        return isinstance(context.model, PipelineModule) or (
            context.size_of("pipe") > 1 and type(context.model) is nn.Sequential
        )

    def check(self, context: RewriteContext) -> None:
        if not isinstance(context.model, PipelineModule):
            _require_no_optimizer(context)

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """Place layers on stages. Raises PolyaccelError where mesh or tensor ranks do not fit them."""
        model, stages = context.model, context.size_of("pipe")
        layers = dict(model.named_modules())
        if not isinstance(model, PipelineModule):
            everywhere = set(model.parameters())
            section = context.runtime.config.pipeline
            model = context.model = PipelineModule(
                list(model.children()),
                stages,
                loss_fn=getattr(model, "loss_fn", None),
                partition_method=_partition_method(context),
                activation_checkpoint_interval=section.activation_checkpoint_interval,
                schedule=section.schedule,
                chunks=section.chunks,
                trial_inputs=getattr(model, "trial_inputs", None),
            )
            _leave_out_others(context, everywhere)
            require_one_stage(layers, partial(_stage_of_layer, model))
        _require_own_cuts(context, model)
        _require_stage_of_mesh(context, model)
        return AppliedRewrite(name=self.name, modules=tuple(name for name, _ in model.named_children()))


class PipelineBlocks(Rewrite):
    """A model with one list of blocks, of which this rank keeps those of its stage."""

    name = "pipeline"

    def is_on(self, context: RewriteContext) -> bool:
        is_list = isinstance(context.model, PipelineModule) or type(context.model) is nn.Sequential
        return context.size_of("pipe") > 1 and not is_list

    def check(self, context: RewriteContext) -> None:
        _require_no_optimizer(context)
        if interval := context.runtime.config.pipeline.activation_checkpoint_interval:
            expected = "has no effect on a model that is cut by its blocks"
            hint = 'set "activation_checkpointing": {"enabled": true}'
            raise ConfigError([Problem("pipeline.activation_checkpoint_interval", interval, expected, hint)])

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """Raises PipelineError for a model that cannot be cut."""
        runtime, section = context.runtime, context.runtime.config.pipeline
        stages = context.size_of("pipe")
        placement = chosen_placement(section.schedule, stages, section.chunks or None)
        stage = runtime.mesh.coordinates(context.rank)["pipe"]
        layers = dict(context.model.named_modules())
        before = {name for name, _ in context.model.named_parameters()}
        everywhere = set(context.model.parameters())
        weigh = partial(measured_blocks, ranks=runtime.communicator)
        cut = StageModule(context.model, placement, stage, _partition_method(context), weigh)
        _leave_out_others(context, everywhere)
        require_one_stage(layers, cut.stage_of)
        others = tuple(name for name, at in zip(cut.names, cut.stages, strict=True) if at != stage)
        gone = before - {name for name, _ in context.model.named_parameters()}
        return AppliedRewrite(name=self.name, modules=others, parameters=tuple(sorted(gone)))


def _stage_of_layer(model: PipelineModule, name: str) -> int:
    return model.stage_of(int(name.partition(".")[0]))


def _leave_out_others(context: RewriteContext, everywhere: set[nn.Parameter]) -> None:
    """Leave parameters of other stages out of those that the script gives: most give those of the whole model. Every
    stage keeps all groups, for schedules count them."""
    if context.model_parameters is None:
        return
    others = everywhere - set(context.model.parameters())

    def kept(members: Any) -> list[Any]:
        members = [members] if isinstance(members, torch.Tensor) else members
        return [one for one in members if one not in others]

    given = list(context.model_parameters)
    if given and isinstance(given[0], Mapping):
        context.model_parameters = [{**group, "params": kept(group["params"])} for group in given]
    else:
        context.model_parameters = kept(given)


def _require_no_optimizer(context: RewriteContext) -> None:
    """Raise PolyaccelError for an optimizer that was made of the parameters of all stages."""
    if isinstance(context.client, torch.optim.Optimizer):
        stages = context.size_of("pipe")
        raise PolyaccelError(
            f"the {type(context.client).__name__} has parameters of all {stages} stages",
            hint='use "optimizer" in the config, give a function that makes it of parameters, or give it those of '
            "a PipelineModule",
            value=type(context.client).__name__,
        )


def _partition_method(context: RewriteContext) -> str:
    partition = context.runtime.config.pipeline.partition
    return "parameters" if partition in ("best", "parameters") else partition


def _require_own_cuts(context: RewriteContext, model: PipelineModule) -> None:
    stages, tensor_ranks = context.size_of("pipe"), context.size_of("tensor")
    if tensor_ranks > 1:
        cut_as_megatron_says(model, context.runtime.mesh, context.rank)
    if stages > 1 and tensor_ranks > 1 and not cuts_of(model):
        raise PolyaccelError(
            f"the layers of a PipelineModule on {tensor_ranks} tensor ranks, which do not cut themselves",
            hint="give a model that is cut along its list of blocks, or layers with parallel_cuts of their own",
            value=tensor_ranks,
        )


def _require_stage_of_mesh(context: RewriteContext, model: PipelineModule) -> None:
    stages, rank = context.size_of("pipe"), context.rank
    stage = context.runtime.mesh.coordinates(rank).get("pipe", 0)
    if model.num_stages == stages and model.stage != stage:
        raise PipelineError(
            f"the PipelineModule of rank {rank} is stage {model.stage}, and the mesh has it on stage {stage}",
            hint="number ranks as the mesh does: neighbours share layers, and the stages come last",
            value=model.stage,
        )
    if model.num_stages != stages:
        raise PolyaccelError(
            f"the PipelineModule has {model.num_stages} stages, and the config {stages}",
            hint='leave "pipeline.stages" out of the config, or give num_stages the same number',
            value=model.num_stages,
        )
