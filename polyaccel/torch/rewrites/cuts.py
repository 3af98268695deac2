"""Parameters cut over ranks: what Megatron's layers declare, tensor parallelism, and experts."""

from __future__ import annotations

from polyaccel.engine.policies.modules import cut_rules_of
from polyaccel.errors import ConfigError, Problem
from polyaccel.torch.compression.models import without_compression
from polyaccel.torch.experts.models import has_experts, spread_experts
from polyaccel.torch.rewrites.base import AppliedRewrite, Rewrite, RewriteContext
from polyaccel.torch.rewrites.compression import follow_cuts
from polyaccel.torch.sharding.tensor_shard import cuts_of
from polyaccel.torch.tensor_parallel.make_plan import plan_by
from polyaccel.torch.tensor_parallel.megatron_compat import cut_as_megatron_says
from polyaccel.torch.tensor_parallel.parallelize import parallelize_module


class MegatronCuts(Rewrite):
    """Parameters that Megatron's layers have cut already, registered as blocks of whole tensors."""

    name = "mpu"

    def is_on(self, context: RewriteContext) -> bool:
        return context.size_of("tensor") > 1

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        marked = cut_as_megatron_says(context.model, context.runtime.mesh, context.rank)
        return AppliedRewrite(name=self.name, parameters=marked) if marked else None


class TensorParallel(Rewrite):
    """Layers cut over the ranks along `tensor`, unless the model has cut itself."""

    name = "tensor_parallel"

    def is_on(self, context: RewriteContext) -> bool:
        return context.size_of("tensor") > 1

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """Cut the model. Raises ShardingError, or ConfigError for one that shares tokens and cut itself."""
        rules = cut_rules_of(context.runtime.config)
        if any("tensor" in cut.axes for cut in cuts_of(context.model).values()):
            if rules.share_tokens:
                expected, hint = "is not possible for a model that cuts itself", "leave it out"
                raise ConfigError([Problem("tensor_parallel.sequence_sharded", True, expected, hint)])
            return None
        ranks = context.runtime.process_group_for(("tensor",))
        with without_compression(context.model):
            plan = plan_by(context.model, ranks.world_size, rules)
            parallelize_module(context.model, ranks, plan)
        follow_cuts(context.model, ranks)
        modules = dict.fromkeys([*(one.name for one in plan.modules), *(one.name for one in plan.heads)])
        cut = tuple(f"{one.name}.{parameter}" for one in plan.modules for parameter in one.cuts)
        return AppliedRewrite(name=self.name, modules=tuple(modules), parameters=cut, unproven=tuple(plan.unproven))


class ExpertParallel(Rewrite):
    """Experts of each layer distributed over the ranks along `expert`."""

    name = "expert_parallel"

    def is_on(self, context: RewriteContext) -> bool:
        return context.runtime.config.expert_parallel.enabled or context.size_of("expert") > 1

    def apply(self, context: RewriteContext) -> AppliedRewrite | None:
        """A stage may have no experts where another one has. Raises ShardingError as `spread_experts`."""
        runtime, has = context.runtime, has_experts(context.model)
        if runtime.mesh.has_several("pipe"):
            others_have = any(runtime.process_group_for(("pipe",)).all_gather_object(has))
            if others_have and not has:
                return None
        spread = spread_experts(context.model, runtime.process_group_for(("expert",)))
        parameters = [
            f"{name}.{one}" for name in spread for one, _ in context.model.get_submodule(name).named_parameters()
        ]
        return AppliedRewrite(name=self.name, modules=spread, parameters=tuple(parameters))
