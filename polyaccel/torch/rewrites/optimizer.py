"""The optimizer on shards: the caller's, else the config's."""

from __future__ import annotations

import torch

from polyaccel.config import ResolvedConfig
from polyaccel.engine.policies.engines import native_optimizer_of
from polyaccel.errors import ConfigError, Problem
from polyaccel.torch.api.client_optimizer import ClientOptimizer, needs_closure
from polyaccel.torch.api.optimizer import make_groups, torch_optimizer
from polyaccel.torch.api.optimizer_proof import check_sliceable
from polyaccel.torch.rewrites.base import AppliedRewrite, Rewrite, RewriteContext
from polyaccel.zero.plan.policy import Placement


class OptimizerShards(Rewrite):
    """An optimizer that updates flat shards of the parameters in place of whole ones."""

    name = "optimizer"

    def is_on(self, context: RewriteContext) -> bool:
        return context.client is not None or context.runtime.config.optimizer is not None

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """Raises ConfigError for an optimizer that this run cannot call, or whose update needs whole parameters."""
        _make_optimizer(context)
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
                context.slice_optimizer = context.slice_optimizers[section.type]()
            context.groups = make_groups(context.model_parameters, model, defaults)
            return
        client = torch_optimizer(section.type, section.params, make_groups(context.model_parameters, model, {}))
    elif not isinstance(client, torch.optim.Optimizer):
        client = client(make_groups(context.model_parameters, model, {}))
    _check_closure(client, runtime.config)
    flat = check_sliceable(
        client,
        sharded=runtime.policy.optim is Placement.SHARDED,
        allow_untested=runtime.config.zero_allow_untested_optimizer,
    )
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    context.slice_optimizer, context.groups = ClientOptimizer(client, names, flat=flat), client.param_groups


def _check_closure(optimizer: torch.optim.Optimizer, config: ResolvedConfig) -> None:
    """Raise ConfigError where `optimizer` calls a closure for the loss (`needs_closure`), and this run cannot compute
    it again within a step."""
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
