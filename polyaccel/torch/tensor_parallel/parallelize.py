"""Cutting a model in place: each rank keeps its blocks, modules get the classes that share, heads are counted again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from polyaccel.comm.base import Communicator
from polyaccel.core.block import Block
from polyaccel.errors import ShardingError
from polyaccel.torch.deferred_init.mapped import MappedFiles
from polyaccel.torch.deferred_init.tensor import DeferredTensor, put
from polyaccel.torch.deferred_init.values import is_deferred, value_of
from polyaccel.torch.sharding.sharded import EngineHook
from polyaccel.torch.sharding.tensor_shard import TensorShard, local_slice
from polyaccel.torch.tensor_parallel.cross_entropy import VocabularyLoss
from polyaccel.torch.tensor_parallel.layers import (
    CachedInput,
    ColumnLayer,
    FeatureEmbedding,
    HeadBiases,
    RowLayer,
    ShardSpec,
    SharedExperts,
    SharedTail,
    SharedWeights,
    VocabularyEmbedding,
    become,
    shared_as,
)
from polyaccel.torch.tensor_parallel.plan import CutModule, CutPlan, TokenPlan
from polyaccel.torch.tensor_parallel.ranks import TensorRanks
from polyaccel.torch.tensor_parallel.regions import Regions, sync_rng
from polyaccel.torch.tensor_parallel.sequence_parallel import TokenBlock, TokenRegion, TokenStream

_log = logging.getLogger(__name__)
_KINDS: dict[str, type] = {
    "column": ColumnLayer,
    "row": RowLayer,
    "vocabulary": VocabularyEmbedding,
    "features": FeatureEmbedding,
    "experts": SharedExperts,
    "shared weights": SharedWeights,
    "shared tail": SharedTail,
    "head biases": HeadBiases,
}


def parallelize_module(model: nn.Module, communicator: Communicator, plan: CutPlan, *, is_logged: bool = True) -> None:
    """Cut `model` by `plan`, in place, for this rank of `communicator`: blocks of the first rank's values. Collective.

    Parameters stay the objects that they are and get separate memory, of the block's size. Of values that every rank
    has in the same mapped file, as `from_pretrained` leaves them, each reads its block and no other. Where parameters
    are on the meta device, so are the blocks; what zero.Init has deferred is computed weight by weight. Raises
    ShardingError where the ranks' plans differ, or the model is not the plan's.
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
    inputs = {parent: CachedInput(count) for parent, count in readers.items()}
    cut: dict[nn.Parameter, Block] = {}
    stream = None if plan.tokens is None else TokenStream(ranks, regions)
    whole = WholeValues(_to_be_cut(modules, plan), ranks)
    for each in plan.modules:
        module = modules[each.name]
        for name in each.cuts:
            _cut_parameter(module, each.name, name, plan.block(each, name, ranks.rank), cut, whole)
        for name, values in each.attributes.items():
            setattr(module, name, values[ranks.rank])
        share = _share(each, ranks, regions)
        if each.how == "column":
            share.input = inputs[each.name.rpartition(".")[0]]
        if plan.tokens is not None and each.how in ("column", "row"):
            share.tokens = stream if plan.tokens.is_inside(each.name) else None
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
            module.parallel_cuts = {name: TensorShard(block) for name, block in found.items()}
    if plan.tokens is not None and stream is not None:
        _share_tokens(modules, plan.tokens, ShardSpec(ranks, regions, tokens=stream), stream)
        model.register_forward_hook(EngineHook(lambda *_: stream.forget()), always_call=True)
    if plan.loss_sizes is not None:
        setattr(model, "loss_function", VocabularyLoss(ranks, plan.loss_sizes))  # noqa: B010 - a property of theirs
    model.register_forward_hook(EngineHook(lambda *_: regions.leave()), always_call=True)
    sync_rng(ranks)
    if is_logged and communicator.ranks[ranks.rank] == 0:
        _log.info("%s", plan.table())
        if (said := whole.summary()) is not None:
            _log.info("%s", said)


class WholeValues:
    """The values of `parameters`, by full name, the same on all `ranks`. Making it is collective.

    What every rank has at the same place of the same mapped file stays there, so that only what is taken of it is read.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: TensorRanks) -> None:
        self._ranks = ranks
        self._files = MappedFiles()
        described = {name: self._files.description(each) for name, each in parameters.items() if not is_deferred(each)}
        gathered = ranks.communicator.all_gather_object({name: said for name, said in described.items() if said})
        self._in_files = {
            name for name, said in gathered[0].items() if all(each.get(name) == said for each in gathered)
        }
        self._others = [name for name in parameters if name not in self._in_files]

    def gather(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Return the whole value of `name`, not to be written to. Collective where it is in no common file."""
        whole = value_of(parameter)  # of a deferred one computed now, and no longer whole than until it is cut
        if whole.is_meta or name in self._in_files:
            return whole
        whole = whole.contiguous()
        if self._ranks.rank and self._files.has(whole):
            whole = whole.clone()  # what is written into a mapped file stays in memory as long as the file is mapped
        self._ranks.broadcast(whole)
        return whole

    def summary(self) -> str | None:
        """A sentence about weights that were loaded from files and are read whole; None where there are none."""
        if not self._in_files or not self._others:
            return None
        return (
            f"{len(self._in_files)} weights were read block by block, and {len(self._others)} whole on every rank, as "
            f"their files have them in another form or not at all: {self._others[0]}"
            + (", ..." if len(self._others) > 1 else "")
        )


def _share(module: CutModule, ranks: TensorRanks, regions: Regions) -> ShardSpec:
    rows = None if module.rows is None else module.rows[ranks.rank]
    return ShardSpec(
        ranks, regions, is_transposed=module.is_transposed, sizes=module.sizes, rows=rows, names=module.names
    )


def _share_tokens(modules: Mapping[str, nn.Module], plan: TokenPlan, share: ShardSpec, stream: TokenStream) -> None:
    """Set in blocks and regions what passes between them, and in the modules in between that they have parts of it."""
    for name, weights in plan.weights.items():
        shared_as(modules[name], SharedWeights, replace(share, names=weights))
    for name in plan.regions:
        become(modules[name], TokenRegion, tokens=stream)
    for name in plan.blocks:
        ends = {"is_first": name == plan.blocks[0], "is_last": name == plan.blocks[-1]}
        become(modules[name], TokenBlock, tokens=stream, **ends)


def _cut_parameter(
    module: nn.Module, path: str, name: str, block: Block, cut: dict[nn.Parameter, Block], values: WholeValues
) -> None:
    """Give a parameter its block of the first rank's values, unless another name cut it."""
    parameter = module._parameters[name]
    assert parameter is not None
    known = cut.setdefault(parameter, block)
    if known is not block:
        if known != block:
            raise ShardingError(
                f"{path}.{name} is shared with a module that cuts it otherwise",
                hint="tie no weights between layers that are cut in different ways",
                value=path,
            )
        return
    keep_part(parameter, local_slice(values.gather(f"{path}.{name}", parameter), block))


def keep_part(parameter: nn.Parameter, value: Tensor) -> None:
    """Let a parameter, which stays the object that it is, have a part of its values."""
    if isinstance(parameter, DeferredTensor):
        put(parameter, value)
    else:
        parameter.data = value


def _to_be_cut(modules: Mapping[str, nn.Module], plan: CutPlan) -> dict[str, nn.Parameter]:
    """The parameters that `plan` cuts by name, of tied ones the first."""
    found: dict[nn.Parameter, str] = {}
    for module in plan.modules:
        for name in module.cuts:
            parameter = modules[module.name]._parameters[name]
            assert parameter is not None
            found.setdefault(parameter, f"{module.name}.{name}")
    return {name: parameter for parameter, name in found.items()}


def _check(model: nn.Module, ranks: TensorRanks, plan: CutPlan) -> None:
    if plan.ranks != ranks.size:
        raise ShardingError(
            f"a plan for {plan.ranks} tensor ranks cannot be carried out by {ranks.size}", value=plan.ranks
        )
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters(remove_duplicate=False)}
    if shapes != dict(plan.shapes):
        raise ShardingError(
            "the plan is one of another model, or the model has been cut already",
            hint="make the plan of the model as it is, and cut once",
            value=plan.model,
        )
    # What a block raises when it is cut depends on which rank of the comparison is first.
    decided = replace(plan, whole=dict.fromkeys(plan.whole, ""), unproven=dict.fromkeys(plan.unproven, ""))
    tables = ranks.communicator.all_gather_object(decided.table())
    if len(set(tables)) > 1:
        raise ShardingError(
            "the tensor ranks have plans that differ",
            hint="build the same model on every rank, with the same config",
            value=tables,
        )


class _Seen:
    """A config as an attention module with its own heads sees it. What is not about them goes through, both ways, to
    the config that it stands for."""

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
