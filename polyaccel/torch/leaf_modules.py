"""Modules that are gathered as one, wherever they stand: mixture-of-experts blocks, whose ranks use different experts.

DeepSpeed's name for them is *leaf modules*. A mark on the module says so: one that callers set before `initialize`, or
one that `initialize` sets for its config, which goes with the engine.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from polyaccel.errors import ShardingError
from polyaccel.torch.homes import home_of

_LEAF = "_polyaccel_leaf"
_CONFIGURED_LEAF = "_polyaccel_configured_leaf"

ModuleChoice = type[nn.Module] | str


def set_leaf_modules(
    model: nn.Module, choices: Iterable[ModuleChoice], *, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Gather every module that matches a choice as one, and return them. Call it before `initialize`.

    A choice is a class, a class's short or qualified name, a module's full name, or the end of one (`mlp.experts`).
    Raises ShardingError when nothing matches, and for a model whose parameters are sharded already.
    """
    chosen = list(choices)
    require_unsharded(model)
    found = matching_modules(model, *chosen)
    for module in found:
        module.__dict__[_LEAF] = True
    if not found and raise_if_not_found:
        raise ShardingError(
            f"no module of the model matches {[str(choice) for choice in chosen]}",
            cure="give a class, its name, a module's full name, or the end of one",
            value=chosen,
        )
    return found


def matching_modules(model: nn.Module, *choices: ModuleChoice) -> list[nn.Module]:
    """The parts of `model` that match a choice."""
    return [module for name, module in model.named_modules() if any(_matches(name, module, one) for one in choices)]


def set_configured_leaves(model: nn.Module, leaves: Iterable[nn.Module]) -> None:
    """Gather each of `leaves` as one for the engine that is being made; those of an earlier engine are forgotten."""
    for module in model.modules():
        module.__dict__.pop(_CONFIGURED_LEAF, None)
    for module in leaves:
        module.__dict__[_CONFIGURED_LEAF] = True


def unset_leaf_modules(
    model: nn.Module, choices: Iterable[ModuleChoice], *, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_leaf_modules`."""
    found = set_leaf_modules(model, choices, raise_if_not_found=raise_if_not_found)
    for module in found:
        del module.__dict__[_LEAF]
    return found


def get_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The parts of `model` that are gathered as one by choice."""
    return [module for module in model.modules() if is_leaf_module(module)]


def is_leaf_module(module: nn.Module) -> bool:
    return bool(module.__dict__.get(_LEAF) or module.__dict__.get(_CONFIGURED_LEAF))


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[ModuleChoice], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """`set_leaf_modules` under DeepSpeed's name."""
    return set_leaf_modules(model, leaf_module_classes, raise_if_not_found=raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """`set_leaf_modules` for full names."""
    return set_leaf_modules(model, module_names, raise_if_not_found=raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """`set_leaf_modules` for the ends of full names."""
    return set_leaf_modules(model, module_name_suffixes, raise_if_not_found=raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[ModuleChoice], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """`unset_leaf_modules` under DeepSpeed's name."""
    return unset_leaf_modules(model, leaf_module_classes, raise_if_not_found=raise_if_not_found)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """`get_leaf_modules` under DeepSpeed's name."""
    return get_leaf_modules(model)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make one module a leaf, or no longer one."""
    require_unsharded(model)
    model.__dict__[_LEAF] = flag


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether one module is a leaf."""
    return is_leaf_module(model)


def require_unsharded(model: nn.Module) -> None:
    """Raise ShardingError if parameters of `model` are sharded, so that it is too late to choose units."""
    for name, parameter in model.named_parameters():
        home = home_of(parameter)
        if home is not None and home.adapter is not None and home.adapter.is_sharded(home.fqn):
            raise ShardingError(
                f"parameter {name!r} is sharded already", cure="choose units before polyaccel.initialize", value=name
            )


def _matches(name: str, module: nn.Module, choice: ModuleChoice) -> bool:
    if isinstance(choice, type):
        return isinstance(module, choice)
    kind = type(module)
    names = (name, kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}")
    return choice in names or name.endswith(f".{choice}")
