"""What a rank holds of a model on the meta device that tensor ranks would share: for planning, without ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from polyaccel.core.block import Block
from polyaccel.engine.policies.modules import CutRules
from polyaccel.torch.sharding.tensor_shard import TensorShard, local_slice
from polyaccel.torch.tensor_parallel.make_plan import plan_by
from polyaccel.torch.tensor_parallel.plan import CutPlan


def shared_by(ranks: int, rules: CutRules) -> Callable[[nn.Module], None]:
    """What makes of a model what the first of `ranks` ranks has of it (`cut_shapes`)."""
    return lambda model: cut_shapes(model, plan_by(model, ranks, rules)) if ranks > 1 else None


def cut_shapes(model: nn.Module, plan: CutPlan) -> None:
    """Give the parameters of `model` the shapes that they have on the first rank, which has the most where blocks are
    uneven. Only for a model that is not run."""
    modules, blocks = dict(model.named_modules()), dict[nn.Parameter, Block]()
    for each in plan.modules:
        for name in each.cuts:
            parameter = modules[each.name]._parameters[name]
            if parameter is not None and parameter not in blocks:
                blocks[parameter] = plan.block(each, name, 0)
                parameter.data = local_slice(parameter.data, blocks[parameter])
    for module in modules.values():
        own = {
            name: TensorShard(blocks[one])
            for name, one in module._parameters.items()
            if one is not None and one in blocks
        }
        if own:
            module.parallel_cuts = own
