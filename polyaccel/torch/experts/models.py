"""Models of transformers whose experts are spread over ranks, each of which has some of every layer's.

The experts of a layer are one module there, with stacks of weights (experts, ...), which is called with tokens, the
numbers of each token's experts, and their weights. Each rank keeps some of every stack. A token is dispatched to its
experts, where the module's own forward computes as if the rank's experts were all there are, and each row had chosen
one of them: a model's own computation within an expert stays as it is. The weights are applied where the token is from.

[Note: Experts without tokens]
A backward pass travels too, and all ranks have to, also one whose experts got no token: its outputs hang on its inputs
and parameters all the same. And gradients arrive in one order on all ranks, zeros where there is nothing to learn: a
rank that waits for a bucket's reduction in the middle of its backward pass keeps those waiting to whose experts its
tokens go, so a gradient that came late on a third rank would let all of them wait for ever.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from polyaccel.comm.base import Communicator
from polyaccel.core.block import Block
from polyaccel.errors import ShardingError
from polyaccel.torch.experts.products import GroupedProducts, computed
from polyaccel.torch.experts.routing import route
from polyaccel.torch.experts.token_dispatch import DispatchBuffers, plan_dispatch
from polyaccel.torch.sharding.tensor_shard import TensorShard, local_slice
from polyaccel.torch.tensor_parallel.layers import present
from polyaccel.torch.tensor_parallel.parallelize import WholeValues, keep_part
from polyaccel.torch.tensor_parallel.ranks import TensorRanks, communicator_for, even_parts

_log = logging.getLogger(__name__)
_CHOSEN = (("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"))
"""What the second and third argument of experts are called."""


class Spread(NamedTuple):
    """How the experts of a layer are spread: `counts[r]` on rank r, in order."""

    communicator: Communicator
    counts: tuple[int, ...]


class ExpertParallelExperts(nn.Module):
    """Experts of which this rank has some."""

    spread: Spread
    products: GroupedProducts | None
    """What computes them; None for the module's own forward."""
    room: DispatchBuffers

    def forward(self, hidden_states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the module's output of `hidden_states` (tokens, features), `experts`, `weights`. Collective."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        communicator, counts = communicator_for(tokens, self.spread.communicator), self.spread.counts
        chosen, shares = experts.reshape(-1, experts.shape[-1]), weights.reshape(-1, weights.shape[-1])
        routing = route(chosen, shares, sum(counts))
        plan = plan_dispatch(communicator, routing, counts, self.room)
        routing = routing.keep(sum(plan.sent))
        came = plan.dispatch(tokens, routing.tokens)
        found = computed(self, came, plan.parts, self.products, plan.room)
        if found is None:
            numbers = plan.repeat_expert_indices().unsqueeze(1)
            found = super().forward(came, numbers, torch.ones_like(numbers, dtype=came.dtype))
        out: Tensor = found
        without = [] if len(came) else [parameter for parameter in self.parameters() if parameter.requires_grad]
        out = _Joined.apply(out, came, *map(present, without))  # type: ignore[no-untyped-call]
        return routing.combined(plan.combine(out), tokens).view_as(hidden_states)


class _Joined(torch.autograd.Function):
    """`rows`, as if the `others` had a part in them: their gradients are zeros. See [Note: Experts without tokens]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(one.shape, one.dtype, one.device) for one in others]
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.others, ctx.needs_input_grad[1:], strict=True)
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if is_needed else None
            for (shape, dtype, device), is_needed in needed
        ]
        return gradient, *zeros


def spread_experts(model: nn.Module, communicator: Communicator) -> tuple[str, ...]:
    """Spread the experts of every layer of `model` over the ranks of `communicator`, in place: stacks of the first
    rank's values, of which each rank keeps its experts'. On one rank, nothing changes but how they are computed.
    Returns the names of the layers. Collective.

    Raises ShardingError for a model without these layers, one with fewer experts than ranks, and where ranks differ.
    """
    found = {name: module for name, module in model.named_modules() if are_experts(module)}
    facts = [(name, type(module).__name__, module.num_experts) for name, module in found.items()]
    if len({str(each) for each in communicator.all_gather_object(facts)}) > 1:
        raise ShardingError("the ranks that share experts have other layers", hint="build the same model on every rank")
    if not found and communicator.world_size == 1:
        return ()
    counts = _counts(model, found, communicator.world_size)
    ranks = TensorRanks(communicator)
    values = WholeValues(
        {fqn: one for name, module in found.items() for fqn, one in module.named_parameters(name)}, ranks
    )
    room = DispatchBuffers(communicator)
    for name, module in found.items():
        _spread(module, name, ranks, counts[name], values)
        module.__dict__["room"] = room
    if communicator.world_size > 1 and communicator.ranks[communicator.rank] == 0:
        shown = ", ".join(f"{name} {even_parts(count, ranks.size)}" for name, _, count in facts)
        _log.info("experts on each of %d ranks: %s", ranks.size, shown)
        if (said := values.summary()) is not None:
            _log.info("%s", said)
    return tuple(found)


def has_experts(model: nn.Module) -> bool:
    """Whether `model` has layers whose experts can be spread."""
    return any(map(are_experts, model.modules()))


def cut_expert_shapes(model: nn.Module, ranks: int) -> None:
    """Give `model`'s experts the largest rank's shapes of `ranks`; the model must not be run."""
    found = {name: module for name, module in model.named_modules() if are_experts(module)}
    for name, counts in _counts(model, found, ranks).items():
        module = found[name]
        module.parallel_cuts = _cuts(module, (0, counts[0]))
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data[: counts[0]]


def _counts(model: nn.Module, found: Mapping[str, nn.Module], ranks: int) -> dict[str, tuple[int, ...]]:
    """How many experts of each layer each rank has. Raises ShardingError where there are none, or too few."""
    if not found:
        raise ShardingError(
            f"{type(model).__name__} has no experts that could be spread over {ranks} ranks",
            hint="they are modules with stacks of weights (experts, ...), called with tokens, the numbers of their "
            "experts and weights, as those of transformers 5; or leave expert_parallel out",
            value=type(model).__name__,
        )
    counts = {name: even_parts(module.__dict__["num_experts"], ranks) for name, module in found.items()}
    for name, each in counts.items():
        if not all(each):
            raise ShardingError(
                f"{name} has {sum(each)} experts for {ranks} ranks",
                hint="use fewer ranks in expert_parallel.autoep_size",
                value=sum(each),
            )
    return counts


def _spread(module: nn.Module, path: str, ranks: TensorRanks, counts: tuple[int, ...], values: WholeValues) -> None:
    own = (ranks.first(counts), counts[ranks.rank])
    cuts = _cuts(module, own)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            keep_part(parameter, local_slice(values.gather(f"{path}.{name}", parameter), _part(parameter, own)))
    setattr(module, "parallel_cuts", cuts)  # noqa: B010 - modules take any attribute
    module.__dict__["num_experts"] = counts[ranks.rank]
    module.__class__ = _spread_class(type(module))
    module.__dict__["spread"] = Spread(ranks.communicator, counts)
    module.__dict__["products"] = None


def _cuts(module: nn.Module, own: tuple[int, int]) -> dict[str, TensorShard]:
    """The cut of each stack to the experts `own` (first, how many), and of what tensor ranks have cut already."""
    known: dict[str, TensorShard] = dict(getattr(module, "parallel_cuts", None) or {})
    cuts = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            before = known.get(name, TensorShard(_part(parameter, own), ()))
            cuts[name] = TensorShard(
                Block(before.block.shape, ((own,), *before.block.runs[1:])), ("expert", *before.axes)
            )
    return cuts


def _part(stack: Tensor, own: tuple[int, int]) -> Block:
    return Block(tuple(stack.shape), ((own,), *(((0, size),) for size in stack.shape[1:])))


_CLASSES: dict[type, type] = {}


def _spread_class(own: type) -> type:
    if own not in _CLASSES:
        _CLASSES[own] = type(f"Spread{own.__name__}", (ExpertParallelExperts, own), {"__module__": __name__})
    return _CLASSES[own]


def are_experts(module: nn.Module) -> bool:
    """Whether a module is the experts of a layer: stacks of weights and nothing else, and called like them."""
    count = getattr(module, "num_experts", None)
    stacks = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not isinstance(count, int) or not stacks or any(each.shape[:1] != (count,) for each in stacks):
        return False
    forwards = [kind.__dict__["forward"] for kind in type(module).__mro__ if "forward" in kind.__dict__]
    names = [tuple(inspect.signature(each).parameters)[2:] for each in forwards]
    return any(each in _CHOSEN for each in names) and max(each.dim() for each in stacks) == 3
