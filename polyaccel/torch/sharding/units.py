"""Which parameters are unsharded together: a *unit* is a module whose parameters are gathered at once.

By default the blocks of the model's longest list of modules are the units, and what remains is the root unit. Users say
otherwise with `set_units`, or make modules *leaves*: parts that are gathered as one wherever they stand. A block
gathers all of its inside, so mixture-of-experts blocks, where ranks use different experts, are safe by default; hence
the list of experts in a block is never taken for the model's list of blocks, however long it is.

[Note: External parameters]
A parameter that a module uses although another module has it is gathered around both. The engine finds and remembers
such uses when they first happen; a declaration makes them part of the first forward too, and is what DeepSpeed's users
may have in their models already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from math import prod

from torch import nn

from polyaccel.errors import ShardingError
from polyaccel.torch.sharding.leaf_modules import is_leaf_module, require_unsharded
from polyaccel.torch.sharding.ownership import record_of
from polyaccel.torch.sharding.tensor_shard import cuts_of

_UNIT = "_polyaccel_unit"
_EXTERNAL = "_polyaccel_external"
_PARTS = "_polyaccel_parts"
_LEAST_BLOCKS = 2


def set_units(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Make `modules` the units of `model`: each is unsharded and resharded as one. They replace the default units.

    Args:
        model: Model, before `initialize`.
        modules: Modules of `model`. Parameters outside of them belong to the root unit.

    Raises:
        ShardingError: A module is not part of the model, or the model is already sharded.
    """
    require_unsharded(model)
    parts = {id(module) for module in model.modules()}
    for module in model.modules():
        module.__dict__.pop(_UNIT, None)
    for module in modules:
        if id(module) not in parts:
            kind = type(module).__name__
            raise ShardingError(f"a {kind} is not part of the model", hint="pass modules of this model", value=kind)
        module.__dict__[_UNIT] = True


def has_units(model: nn.Module) -> bool:
    """Whether `set_units` has said what the units of `model` are."""
    return any(_UNIT in module.__dict__ for module in model.modules())


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """The units by full name, in order; none lies inside another."""
    modules = dict(model.named_modules())
    chosen = {name: module for name, module in modules.items() if _UNIT in module.__dict__}
    units = _outermost(chosen or _longest_list(model))
    leaves = {name: module for name, module in modules.items() if is_leaf_module(module)}
    return _outermost({**units, **{name: leaf for name, leaf in leaves.items() if not _is_inside(name, units)}})


def find_blocks(model: nn.Module, names: Iterable[str] = ()) -> dict[str, nn.Module]:
    """The modules to recompute, by full name, in order; none lies inside another.

    `names` choose them by class, or by full name, where `*` stands for any part of it. Without names they are those of
    `set_units`, or else the repeated blocks of the model: of each list of at least two modules of one class that have
    parts. Lists inside a block do not count.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    wanted = tuple(names)
    if wanted:
        return _outermost(
            {
                name: module
                for name, module in modules.items()
                if any(type(module).__name__ == one or fnmatchcase(name, one) for one in wanted)
            }
        )
    marked = {name: module for name, module in modules.items() if _UNIT in module.__dict__}
    if marked:
        return _outermost(marked)
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if name in blocks or _is_inside(name, blocks):
            continue
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            children = {f"{name}.{index}" if name else index: child for index, child in module.named_children()}
            is_uniform = len({type(child) for child in children.values()}) == 1
            if len(children) >= _LEAST_BLOCKS and is_uniform and all(map(_has_parts, children.values())):
                blocks.update(children)
    return blocks


def units_of_parameters(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, str]:
    """The unit of each parameter by full name; "" is the root unit. A parameter that units share is the root's."""
    owners: dict[nn.Parameter, set[str]] = {}
    for name, module in model.named_modules():
        unit = next((unit for unit in units if name == unit or name.startswith(f"{unit}.")), "")
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(unit)
    return {
        fqn: min(owners[parameter]) if len(owners[parameter]) == 1 else ""
        for fqn, parameter in model.named_parameters()
    }


def set_parts(model: nn.Module, parts: Mapping[str, str]) -> None:
    """Set the part of `model`'s parameters: parts get gradients in different backward passes."""
    model.__dict__[_PARTS] = dict(parts)


def parts_of_parameters(model: nn.Module) -> dict[str, str]:
    """What `set_parts` has said."""
    return dict(model.__dict__.get(_PARTS, {}))


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Unshard `parameter` around `module` too, which uses it although another module owns it. DeepSpeed's name.

    It works before and after `initialize`, and repeating it changes nothing. See [Note: External parameters].

    Args:
        module: Module that uses the parameter in its forward pass.
        parameter: Parameter of another module.
    """
    declared: list[nn.Parameter] = module.__dict__.setdefault(_EXTERNAL, [])
    if not any(parameter is other for other in declared):
        declared.append(parameter)
    home = record_of(parameter)
    if home is not None and home.owner is not None:
        home.owner.sharding.register_external(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`.

    Args:
        module: Module that no longer uses the parameter.
        parameter: Parameter of another module. One that is not registered is ignored.
    """
    declared = external_parameters(module)
    module.__dict__[_EXTERNAL] = [other for other in declared if other is not parameter]
    home = record_of(parameter)
    if home is not None and home.owner is not None and len(module.__dict__[_EXTERNAL]) < len(declared):
        home.owner.sharding.unregister_external(module, parameter)


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that were declared external to `module`."""
    return list(module.__dict__.get(_EXTERNAL, ()))


def _longest_list(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of the longest list of modules; of equally long ones, those with most parameters.

    Parameters count with their whole shapes: ranks that hold uneven blocks choose the same list.
    Lists inside a block of a list whose blocks are all of one class do not count: they are that block's business.
    """
    best: tuple[int, int] = (_LEAST_BLOCKS - 1, 0)
    blocks: dict[str, nn.Module] = {}
    repeated: list[str] = []
    whole = {parameter: prod(cut.block.shape) for parameter, cut in cuts_of(model).items()}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or _is_inside(name, repeated):
            continue
        children = {f"{name}.{index}" if name else index: child for index, child in module.named_children()}
        if len(children) >= _LEAST_BLOCKS and len({type(child) for child in children.values()}) == 1:
            repeated.append(name)
        weight = (len(module), sum(whole.get(one, one.numel()) for one in module.parameters()))
        if weight > best and weight[0] >= _LEAST_BLOCKS:
            best, blocks = weight, children
    return {name: block for name, block in blocks.items() if any(True for _ in block.parameters())}


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: module for name, module in modules.items() if not _is_inside(name, modules)}


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    return any(name.startswith(f"{outer}.") for outer in modules if outer) or ("" in modules and name != "")
