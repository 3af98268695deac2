"""Cutting a model in place: each rank keeps its blocks, modules get the classes that share, heads are counted anew."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from polyaccel.comm.base import Communicator
from polyaccel.errors import ShardingError
from polyaccel.mesh.block import Block
from polyaccel.torch.deferred.tensor import DeferredTensor, put
from polyaccel.torch.deferred.values import value_of
from polyaccel.torch.parallel.cross_entropy import VocabularyLoss
from polyaccel.torch.parallel.layers import (
    ColumnLayer,
    FeatureEmbedding,
    RowLayer,
    Share,
    SharedExperts,
    SharedInput,
    SharedTail,
    SharedWeights,
    VocabularyEmbedding,
    shared_as,
)
from polyaccel.torch.parallel.plan import CutModule, CutPlan
from polyaccel.torch.parallel.ranks import TensorRanks
from polyaccel.torch.parallel.regions import Regions, draw_alike
from polyaccel.torch.params.cuts import Cut, taken

_log = logging.getLogger(__name__)
_KINDS: dict[str, type] = {
    "column": ColumnLayer,
    "row": RowLayer,
    "vocabulary": VocabularyEmbedding,
    "features": FeatureEmbedding,
    "experts": SharedExperts,
    "shared weights": SharedWeights,
    "shared tail": SharedTail,
}


def cut_model(model: nn.Module, communicator: Communicator, plan: CutPlan) -> None:
    """Cut `model` as `plan` says, in place, for this rank of `communicator`: blocks of the first rank's values.
    Collective.

    Parameters stay the objects that they are and get memory of their own, of the block's size. Where they are on the
    meta device, so are the blocks; what zero.Init has deferred is computed weight by weight. Raises ShardingError where
    the ranks' plans differ, or the model is not the plan's.
    """
    ranks = TensorRanks(communicator)
    _check(model, ranks, plan)
    modules = dict(model.named_modules())
    regions = Regions(ranks)
    readers: dict[str, int] = {}
    for each in plan.modules:
        if each.how == "column":
            parent = each.name.rpartition(".")[0]
            readers[parent] = readers.get(parent, 0) + 1
    inputs = {parent: SharedInput(count) for parent, count in readers.items()}
    cut: dict[nn.Parameter, Block] = {}
    for each in plan.modules:
        module = modules[each.name]
        for name in each.cuts:
            _cut_parameter(module, each.name, name, plan.block(each, name, ranks.rank), cut, ranks)
        for name, values in each.attributes.items():
            setattr(module, name, values[ranks.rank])
        share = _share(each, ranks, regions)
        if each.how == "column":
            share.input = inputs[each.name.rpartition(".")[0]]
        if each.how != "shared weights" or each.names:
            shared_as(module, _KINDS[each.how], share)
    for heads in plan.heads:
        module = modules[heads.name]
        for name, values in heads.attributes.items():
            setattr(module, name, values[ranks.rank])
        if getattr(module, "config", None) is not None:
            module.config = _seen(
                module.config, {name: each[ranks.rank] for name, each in heads.config_numbers.items()}
            )
    for module in modules.values():
        found = {name: cut[p] for name, p in module._parameters.items() if p is not None and p in cut}
        if found:
            module.parallel_cuts = {name: Cut(block) for name, block in found.items()}
    if plan.loss_sizes is not None:
        setattr(model, "loss_function", VocabularyLoss(ranks, plan.loss_sizes))  # noqa: B010 - a property of theirs
    model.register_forward_hook(lambda *_: regions.leave(), always_call=True)
    draw_alike(ranks)
    if communicator.ranks[ranks.rank] == 0:
        _log.info("%s", plan.table())


def _share(module: CutModule, ranks: TensorRanks, regions: Regions) -> Share:
    rows = None if module.rows is None else module.rows[ranks.rank]
    return Share(ranks, regions, is_transposed=module.is_transposed, sizes=module.sizes, rows=rows, names=module.names)


def _cut_parameter(
    module: nn.Module, path: str, name: str, block: Block, cut: dict[nn.Parameter, Block], ranks: TensorRanks
) -> None:
    """Give a parameter its block of the first rank's values, in memory of its own. What was cut by another of its names
    stays."""
    parameter = module._parameters[name]
    assert parameter is not None
    known = cut.setdefault(parameter, block)
    if known is not block:
        if known != block:
            raise ShardingError(
                f"{path}.{name} is shared with a module that cuts it otherwise",
                cure="tie no weights between layers that are cut in different ways",
                value=path,
            )
        return
    whole = value_of(parameter)  # of a deferred one computed now, and no longer whole than until it is cut
    if not whole.is_meta:
        whole = whole.contiguous()
        ranks.broadcast(whole)
    if isinstance(parameter, DeferredTensor):
        put(parameter, taken(whole, block))
    else:
        parameter.data = taken(whole, block)


def _check(model: nn.Module, ranks: TensorRanks, plan: CutPlan) -> None:
    if plan.ranks != ranks.size:
        raise ShardingError(
            f"a plan for {plan.ranks} tensor ranks cannot be carried out by {ranks.size}", value=plan.ranks
        )
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters(remove_duplicate=False)}
    if shapes != dict(plan.shapes):
        raise ShardingError(
            "the plan is one of another model, or the model has been cut already",
            cure="make the plan of the model as it is, and cut once",
            value=plan.model,
        )
    tables = ranks.communicator.all_gather_object(plan.table())
    if len(set(tables)) > 1:
        raise ShardingError(
            "the tensor ranks have plans that differ",
            cure="build the same model on every rank, with the same config",
            value=tables,
        )


class _Seen:
    """A config as an attention module sees it that has heads of its own. What is not about them goes through, both
    ways, to the config that it stands for."""

    def __getattribute__(self, name: str) -> Any:
        numbers: Mapping[str, Any] = object.__getattribute__(self, "_numbers")
        if name in numbers:
            return numbers[name]
        if name in ("__class__", "__deepcopy__"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_whole"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_whole"), name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        whole = copy.deepcopy(object.__getattribute__(self, "_whole"), memo)
        return _seen(whole, object.__getattribute__(self, "_numbers"))


_SEEN_CLASSES: dict[type, type] = {}


def _seen(config: Any, numbers: Mapping[str, int]) -> Any:
    """`config` with other `numbers`. See `_Seen`."""
    own = type(config)
    if own not in _SEEN_CLASSES:
        _SEEN_CLASSES[own] = type(own.__name__, (_Seen, own), {"__module__": own.__module__})
    seen: Any = object.__new__(_SEEN_CLASSES[own])
    object.__setattr__(seen, "_whole", config)
    object.__setattr__(seen, "_numbers", dict(numbers))
    return seen
