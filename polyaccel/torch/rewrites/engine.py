"""What the engine does to the model while it is built: buckets of parameters, matrix products, recomputation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakMethod

import torch

from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.config import ResolvedConfig
from polyaccel.engine.policies.engines import native_optimizer_of, require_wide_states
from polyaccel.engine.policies.muon import MUON
from polyaccel.engine.policies.recordings import record_updates
from polyaccel.engine.policies.step_inputs import step_input_policy_of
from polyaccel.errors import ConfigError, Problem
from polyaccel.torch.activation_checkpointing.blocks import Recomputation
from polyaccel.torch.api.client_optimizer import ClientOptimizer, needs_closure
from polyaccel.torch.api.mup import MUP, mup_groups
from polyaccel.torch.api.optimizer import ParamGroups, make_groups, torch_optimizer
from polyaccel.torch.api.optimizer_proof import check_sliceable
from polyaccel.torch.exact.forward import ExactForward
from polyaccel.torch.layer_drop import DroppedBlocks, drops_itself
from polyaccel.torch.linears import Linears
from polyaccel.torch.muon.groups import muon_groups
from polyaccel.torch.muon.optimizer import MuonOptimizer
from polyaccel.torch.rewrites.base import AppliedRewrite, RewritableEngine, Rewrite, RewriteContext
from polyaccel.zero.plan.policy import Placement
from polyaccel.zero.update.named_optimizers import slice_optimizer


class ZeroShards(Rewrite):
    """Parameters in flat buckets, sharded over the data ranks as the stage says."""

    name = "zero_optimization"
    needs_engine = True

    def is_on(self, context: RewriteContext) -> bool:
        return True

    def apply(self, context: RewriteContext) -> AppliedRewrite:
        engine = engine_of(context)
        names = engine.shard_parameters()
        method = WeakMethod(engine.unshard_parameters)  # an engine that nothing else refers to is freed at once

        def remove() -> None:
            if (unshard := method()) is not None:
                unshard()

        return AppliedRewrite(name=self.name, parameters=names, remove=remove, is_collective=True)


class MatrixKernels(Rewrite):
    """Linear layers over the accelerator's own matrix products, where it has faster ones than torch."""

    name = "matrix_kernels"
    needs_engine = True

    def is_on(self, context: RewriteContext) -> bool:
        return True

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        engine, choice = engine_of(context), context.settings.matrix_kernels
        linears = engine.linears = Linears(context.model, engine.accelerator, engine.communicator, choice)
        if not linears.names:
            return None
        return AppliedRewrite(name=self.name, modules=linears.names, remove=linears.release)


class ActivationCheckpointing(Rewrite):
    """Blocks whose activations are computed again in the backward pass."""

    name = "activation_checkpointing"
    needs_engine = True

    def is_on(self, context: RewriteContext) -> bool:
        return context.settings.recompute is not None

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """Raises ConfigError for a model in which no blocks are found."""
        engine, runtime = engine_of(context), context.runtime
        done = engine.recomputation = Recomputation(
            context.model,
            context.settings.recompute,
            engine.accelerator,
            runtime.process_group_for,
            engine.saved_tensor_hooks,
            runtime.trace,
        )
        if done.blocks is None:
            return None
        return AppliedRewrite(name=self.name, modules=done.blocks.names, remove=done.release)


class ProgressiveLayerDrop(Rewrite):
    """Blocks that are skipped at random in training, of a model that does not skip them itself."""

    name = "progressive_layer_drop"
    needs_engine = True

    def is_on(self, context: RewriteContext) -> bool:
        return step_input_policy_of(context.runtime.config).layers is not None and not drops_itself(context.model)

    def apply(self, context: RewriteContext) -> AppliedRewrite:
        """Raises ConfigError for a model in which no blocks are found."""
        policy, counters = step_input_policy_of(context.runtime.config).layers, engine_of(context).counters
        assert policy is not None  # else the rewrite is off
        done = DroppedBlocks(context.model, policy, lambda: (counters.global_steps, counters.micro_steps))
        return AppliedRewrite(name=self.name, modules=done.names, remove=done.release)


class ExactGeneration(Rewrite):
    """Forward passes whose bits do not depend on the batch."""

    name = "generation"
    needs_engine = True

    def is_on(self, context: RewriteContext) -> bool:
        return context.settings.generation.is_exact

    def apply(self, context: RewriteContext) -> AppliedRewrite:
        """Raises ConfigError on an accelerator without a fitting product."""
        done = ExactForward(context.model, engine_of(context).accelerator)
        names = tuple(name for name, _ in context.model.named_modules())
        return AppliedRewrite(name=self.name, modules=names, remove=done.release)


def engine_of(context: RewriteContext) -> RewritableEngine:
    """The engine that is being built."""
    assert context.engine is not None  # the engine applies the rewrites that need one
    return context.engine


class OptimizerShards(Rewrite):
    """An optimizer that updates flat shards of the parameters in place of whole ones."""

    name = "optimizer"

    def is_on(self, context: RewriteContext) -> bool:
        return context.client is not None or context.runtime.config.optimizer is not None

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """Raises ConfigError for an optimizer that this run cannot call, or whose update needs whole parameters."""
        _make_optimizer(context)
        runtime = context.runtime
        context.slice_optimizer = record_updates(runtime.config, runtime.accelerator, context.slice_optimizer)
        names = {parameter: fqn for fqn, parameter in context.model.named_parameters()}
        trained = [names[one] for group in context.groups for one in group["params"] if one in names]
        return AppliedRewrite(name=self.name, parameters=tuple(trained))


def _make_optimizer(context: RewriteContext) -> None:
    """Set the optimizer on shards and its groups."""
    runtime, model, client = context.runtime, context.model, context.client
    section = runtime.config.optimizer
    if client is None:
        assert section is not None  # else the rewrite is off
        native = native_optimizer_of(runtime.config)
        if native is not None:
            context.slice_optimizer, defaults = native
            if section.type in context.slice_optimizers:
                if context.slice_optimizer.state_types:
                    expected = "this formula has states of 32 bits"
                    raise ConfigError([Problem("optimizer.type", section.type, expected, 'leave "state_bits" out')])
                context.slice_optimizer = context.slice_optimizers[section.type]()
            context.groups = make_groups(context.model_parameters, model, defaults)
            return
    require_wide_states(runtime.config)
    if client is None:
        assert section is not None
        if section.type in MUP:
            context.slice_optimizer = slice_optimizer(MUP[section.type])
            context.groups = mup_groups(section.type, section.params, context.model_parameters, model)
            return
        groups = make_groups(context.model_parameters, model, {})
        if section.type == MUON:
            _make_muon(context, section.params, groups)
            return
        client = torch_optimizer(section.type, section.params, groups)
    elif not isinstance(client, torch.optim.Optimizer):
        client = client(make_groups(context.model_parameters, model, {}))
    _check_closure(client, runtime.config)
    sharded = runtime.policy.optim is Placement.SHARDED
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    allow_untested = runtime.config.zero_allow_untested_optimizer
    whole = () if check_sliceable(client, sharded=sharded, allow_untested=allow_untested) else names.values()
    context.slice_optimizer = ClientOptimizer(client, names, whole=whole, is_sharded=sharded)
    context.groups = client.param_groups


def _make_muon(context: RewriteContext, params: Mapping[str, Any], groups: ParamGroups) -> None:
    """Set the config's Muon and its groups."""
    runtime, model = context.runtime, context.model
    found = muon_groups(params, groups, model, keeps_empty=runtime.mesh.size_of(("pipe",)) > 1)
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    context.groups = found.groups
    context.slice_optimizer = MuonOptimizer(
        found.groups,
        {names[parameter]: rows for parameter, rows in found.heads.items()},
        along=runtime.process_group_for,
        blockwise=params["tp_mode"] == "blockwise",
        device=torch_device_of(runtime.accelerator),
    )


def _check_closure(optimizer: torch.optim.Optimizer, config: ResolvedConfig) -> None:
    """Raise ConfigError where `optimizer` needs a closure that this run cannot compute again."""
    if not needs_closure(optimizer):
        return
    reason = f"{type(optimizer).__name__} evaluates the loss several times a step"
    stage, steps = config.zero_optimization.stage, config.gradient_accumulation_steps
    problems = []
    if stage != 0:
        problems.append(Problem("zero_optimization.stage", stage, reason, "use stage 0"))
    for key in ("bf16", "fp16"):
        if getattr(config, key).enabled:
            problems.append(Problem(f"{key}.enabled", True, reason, "train in fp32"))
    if steps != 1:
        problems.append(Problem("gradient_accumulation_steps", steps, reason, "use 1; the closure may add losses up"))
    if (clipping := config.gradient_clipping) != 0.0:
        problems.append(Problem("gradient_clipping", clipping, reason, "call clip_grad_norm_ in the closure"))
    if problems:
        raise ConfigError(problems)
