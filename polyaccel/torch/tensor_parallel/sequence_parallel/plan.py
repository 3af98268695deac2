"""Which blocks of a model can work on parts of the tokens, and what of them stands between regions: names only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from polyaccel.errors import ShardingError
from polyaccel.torch.sharding.units import find_blocks
from polyaccel.torch.tensor_parallel.plan import CutPlan, TokenPlan
from polyaccel.torch.tensor_parallel.structure import CutRegion

_KEY = "tensor_parallel.sequence_sharded"


def with_shared_tokens(plan: CutPlan, model: nn.Module, regions: Iterable[CutRegion]) -> CutPlan:
    """`plan`, and that ranks share tokens between its `regions`.

    Raises ShardingError, naming a module, for a model that has something else than norms between attention and
    feed-forward layers, or whose regions are not modules inside of blocks of one list.
    """
    modules = dict(model.named_modules())
    inside = {region.name: region for region in regions}
    blocks = tuple(find_blocks(model))
    lists = {name.rpartition(".")[0] for name in blocks}
    kind = type(model).__name__
    if len(lists) != 1 or not inside:
        raise _refused(kind, f"it has {len(lists)} lists of blocks, and not one")
    for name, region in inside.items():
        _check_region(region, blocks, plan, modules)
        if not any(name.startswith(f"{block}.") for block in blocks):
            raise _refused(name, "it is not a module inside of a block")
    weights = {}
    for block in blocks:
        if not any(name.startswith(f"{block}.") for name in inside):
            raise _refused(block, "nothing of it is cut")
        for name, module in modules[block].named_modules(prefix=block):
            own = dict(module.named_parameters(recurse=False))
            if not own or any(name == region or name.startswith(f"{region}.") for region in inside):
                continue
            if any(parameter.dim() != 1 for parameter in own.values()):
                raise _refused(name, "it stands between regions that are cut, and is not a norm")
            weights[name] = tuple(own)
    return replace(plan, tokens=TokenPlan(blocks, tuple(inside), weights))


def _check_region(region: CutRegion, blocks: Iterable[str], plan: CutPlan, modules: Mapping[str, nn.Module]) -> None:
    """Raise ShardingError for a region that needs more than its tokens gathered before and its outputs added up."""
    by_name = {each.name: each for each in plan.modules}
    if region.name in blocks:
        raise _refused(region.name, "its layers stand in the block itself, and not in a separate module")
    for layer in region.layers:
        if not layer.startswith(f"{region.name}."):
            raise _refused(region.name, f"{layer} stands outside of it")
    rows = [each for each in region.modules if each.how == "row"]
    if len(rows) != 1:
        raise _refused(region.name, "it has experts, or ends in no layer that is cut by its inputs")
    for name, module in modules[region.name].named_modules(prefix=region.name):
        own = [each for each, _ in module.named_parameters(recurse=False)]
        cut = by_name.get(name)
        if own and (cut is None or cut.sizes is not None or cut.how not in ("column", "row", "shared weights")):
            raise _refused(name, "its weights are whole, and all ranks compute the same with them")


def _refused(name: str, why: str) -> ShardingError:
    return ShardingError(
        f"{_KEY}: tensor ranks cannot share the tokens of {name}: {why}",
        hint=f"leave {_KEY} out, or share sequences by sequence_parallel_size",
        value=name,
    )
