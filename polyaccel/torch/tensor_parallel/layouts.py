"""Other ways to cut a region whose layers have known names and unknown layouts: `other_layouts`.

A fused layer of queries, keys and values may have them in groups of heads, a fused layer of gates in turn, a parameter
one element for each inner feature, and a module may keep numbers of features under any name. Which of these holds is
decided by `polyaccel.torch.tensor_parallel.comparison`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from polyaccel.torch.tensor_parallel import names
from polyaccel.torch.tensor_parallel.plan import CutHeads, CutModule, RunsOfRanks, even_runs, lengths, scaled
from polyaccel.torch.tensor_parallel.ranks import even_parts
from polyaccel.torch.tensor_parallel.structure import (
    CutRegion,
    column,
    inputs_of,
    is_linear,
    outputs_of,
    query_heads,
    row,
)


def other_layouts(block: nn.Module, region: CutRegion, ranks: int) -> Iterator[CutRegion]:
    """Yield other ways to cut `region`, whose names are those in `block`."""
    modules = dict(block.named_modules())
    rows = [one for one in region.modules if one.how == "row" and is_linear(modules.get(one.name))]
    if len(rows) != 1:
        return
    width = inputs_of(modules[rows[0].name])
    for one in (region, *_fused(modules, region, rows[0], width, ranks)):
        of_features = _of_features(modules, one, width)
        variants = [one, _counted(modules, one, width)]
        if of_features:
            variants += [replace(variant, modules=(*variant.modules, *of_features)) for variant in variants]
        for variant in variants:
            if variant != region:
                yield variant


def _fused(
    modules: dict[str, nn.Module], region: CutRegion, end: CutModule, width: int, ranks: int
) -> Iterator[CutRegion]:
    """Layouts of a layer with all inner features two or three times."""
    for module in region.modules:
        if module.how != "column" or not is_linear(modules[module.name]) or module.rows is not None:
            continue
        outputs = outputs_of(modules[module.name])
        if outputs == 2 * width and not region.heads:
            yield _with(modules, region, {module.name: scaled(end.cuts["weight"][1], 2)})
        if outputs != 3 * width or len(region.heads) != 1:
            continue
        attention = modules[region.heads[0].name]
        heads = query_heads(attention) or query_heads(getattr(attention, "config", None)) or 0
        if heads < ranks or width % heads:
            continue
        size = width // heads
        for groups in (each for each in range(heads, 1, -1) if heads % each == 0):
            each = width // groups
            if groups >= ranks:  # whole groups of heads
                inner = even_runs(groups, ranks, unit=each)
                counts = tuple(count * heads // groups for count in even_parts(groups, ranks))
                yield _with(modules, region, {module.name: scaled(inner, 3), end.name: inner}, counts)
            if heads // groups >= ranks:  # a part of each group
                parts = [run for (run,) in even_runs(heads // groups, ranks, unit=size)]
                fused, inner = (
                    tuple(tuple((place * each + first, length) for place in range(times)) for first, length in parts)
                    for times in (3 * groups, groups)
                )
                counts = tuple(count * groups for count in even_parts(heads // groups, ranks))
                yield _with(modules, region, {module.name: fused, end.name: inner}, counts)


def _with(
    modules: dict[str, nn.Module], region: CutRegion, runs: dict[str, RunsOfRanks], heads: tuple[int, ...] = ()
) -> CutRegion:
    """`region` with other `runs` of some layers, and other numbers of `heads`."""
    made = []
    for one in region.modules:
        if one.name in runs:
            make = row if one.how == "row" else column
            one = make(one.name, modules[one.name], runs[one.name])
        made.append(one)
    counted = region.heads
    if heads:
        (own,) = region.heads
        module, whole = modules[own.name], sum(heads)
        attributes = {
            name: each if name in names.GROUPS else tuple(getattr(module, name) * count // whole for count in heads)
            for name, each in own.attributes.items()
        }
        counted = (replace(own, attributes=attributes, config_numbers=dict.fromkeys(own.config_numbers, heads)),)
    return replace(region, modules=tuple(made), heads=counted)


def _counted(modules: dict[str, nn.Module], region: CutRegion, width: int) -> CutRegion:
    """`region` with every number of its module that is the number of inner features as each rank's number."""
    end = next(one for one in region.modules if one.how == "row")
    each = lengths(end.cuts["weight"][1])
    module = modules[region.name]
    found = {name: each for name, value in vars(module).items() if type(value) is int and value == width}
    if not found:
        return region
    if region.heads:
        (own, *others) = region.heads
        return replace(region, heads=(replace(own, attributes={**found, **own.attributes}), *others))
    return replace(region, heads=(CutHeads(region.name, found, {}),))


def _of_features(modules: dict[str, nn.Module], region: CutRegion, width: int) -> list[CutModule]:
    """Parameters between the layers with one element for each inner feature."""
    end = next(one for one in region.modules if one.how == "row")
    runs, cut = end.cuts["weight"][1], {one.name for one in region.modules}
    found = []
    for name, module in modules.items():
        is_inside = not region.name or name == region.name or name.startswith(f"{region.name}.")
        own = {
            each: (0, runs)
            for each, p in module.named_parameters(recurse=False)
            if is_inside and name not in cut and tuple(p.shape) == (width,)
        }
        if own:
            found.append(CutModule(name, "shared weights", own))
    return found
