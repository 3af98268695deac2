"""Leaf modules: modules that are unsharded as one, such as mixture-of-experts blocks, whose ranks use different
experts.

`set_leaf_modules` sets a mark on the module before `initialize`; `mark_configured_leaves` sets one for the engine that
is being built, by its config. The term is DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from logging import getLogger

from torch import nn
from torch.nn.modules import container

from polyaccel.engine.policies.modules import LeafRules
from polyaccel.errors import ConfigError, Problem, ShardingError
from polyaccel.torch.sharding.ownership import record_of

log = getLogger(__name__)

_LEAF = "_z3_leaf"
_CONFIGURED_LEAF = "_polyaccel_configured_leaf"
_MAX_LEAF_NUMEL = 10**9
"""A larger module is never a leaf by its granularity: all of it would be live at once."""
_CONTAINERS = tuple(getattr(container, name) for name in container.__all__)

ModuleChoice = type[nn.Module] | str


def set_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[ModuleChoice], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make every module that matches a choice a leaf: it is unsharded as one.

    Args:
        model: Model, before `initialize`.
        leaf_module_classes: Choices: a class, its short or qualified name, a module's full name, or the end of one
            (`mlp.experts`).
        raise_if_not_found: Raise ShardingError if no module matches.

    Returns:
        The modules that match.

    Raises:
        ShardingError: No module matches, or the model is already sharded.
    """
    chosen = list(leaf_module_classes)
    require_unsharded(model)
    found = matching_modules(model, *chosen)
    for module in found:
        module.__dict__[_LEAF] = True
    if not found and raise_if_not_found:
        raise ShardingError(
            f"no module of the model matches {[str(choice) for choice in chosen]}",
            hint="give a class, its name, a module's full name, or the end of one",
            value=chosen,
        )
    return found


def matching_modules(model: nn.Module, *choices: ModuleChoice) -> list[nn.Module]:
    """Return the modules of `model` that match a choice.

    Args:
        model: Model to search, itself included.
        *choices: As in `set_leaf_modules`.

    Returns:
        Matching modules, in the order of `named_modules`.
    """
    return [
        module for name, module in model.named_modules() if any(_matches(name, module, choice) for choice in choices)
    ]


def set_configured_leaves(model: nn.Module, leaves: Iterable[nn.Module]) -> None:
    """Make `leaves` the leaf modules of the engine that is being built, in place of those of an earlier engine.

    Args:
        model: Model of the engine.
        leaves: Modules of `model`.
    """
    for module in model.modules():
        module.__dict__.pop(_CONFIGURED_LEAF, None)
    for module in leaves:
        module.__dict__[_CONFIGURED_LEAF] = True


def unset_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[ModuleChoice], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_leaf_modules`.

    Args:
        model: Model, before `initialize`.
        leaf_module_classes: Choices, as in `set_leaf_modules`.
        raise_if_not_found: Raise ShardingError if no module matches.

    Returns:
        The modules that match.

    Raises:
        ShardingError: No module matches, or the model is already sharded.
    """
    found = set_leaf_modules(model, leaf_module_classes, raise_if_not_found)
    for module in found:
        del module.__dict__[_LEAF]
    return found


def get_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the leaf modules of a model.

    Args:
        model: Model to search, itself included.

    Returns:
        Leaf modules, in the order of `modules`.
    """
    return [module for module in model.modules() if is_leaf_module(module)]


def is_leaf_module(model: nn.Module) -> bool:
    """Return whether one module is a leaf.

    Args:
        model: Module to ask.

    Returns:
        True if a caller or a config made it a leaf.
    """
    return bool(model.__dict__.get(_LEAF) or model.__dict__.get(_CONFIGURED_LEAF))


# DeepSpeed's names.
set_z3_leaf_modules, unset_z3_leaf_modules = set_leaf_modules, unset_leaf_modules
get_z3_leaf_modules, z3_leaf_module = get_leaf_modules, is_leaf_module


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make modules leaves by their full names. DeepSpeed's name.

    Args:
        model: Model, before `initialize`.
        module_names: Full names, or choices as in `set_leaf_modules`.
        raise_if_not_found: Raise ShardingError if no module matches.

    Returns:
        The modules that match.

    Raises:
        ShardingError: No module matches, or the model is already sharded.
    """
    return set_leaf_modules(model, module_names, raise_if_not_found=raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make modules leaves by the ends of their full names. DeepSpeed's name.

    Args:
        model: Model, before `initialize`.
        module_name_suffixes: Ends of full names, or choices as in `set_leaf_modules`.
        raise_if_not_found: Raise ShardingError if no module matches.

    Returns:
        The modules that match.

    Raises:
        ShardingError: No module matches, or the model is already sharded.
    """
    return set_leaf_modules(model, module_name_suffixes, raise_if_not_found=raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make one module a leaf, or no longer one. DeepSpeed's name.

    Args:
        model: Module to mark, before `initialize`.
        flag: Whether it is a leaf.

    Raises:
        ShardingError: The module is already sharded.
    """
    require_unsharded(model)
    model.__dict__[_LEAF] = flag


def require_unsharded(model: nn.Module) -> None:
    """Raise if it is too late to choose units.

    Args:
        model: Model to check.

    Raises:
        ShardingError: A parameter is already sharded; the message names it.
    """
    for name, parameter in model.named_parameters():
        home = record_of(parameter)
        if home is not None and home.owner is not None and home.owner.is_sharded(home.fqn):
            raise ShardingError(
                f"parameter {name!r} is sharded already", hint="choose units before polyaccel.initialize", value=name
            )


# The leaves that a config asks for: those it lists, and those finer than its threshold.


def mark_configured_leaves(model: nn.Module, rules: LeafRules) -> None:
    """Make the modules that a config asks for the leaf modules of `model`.

    Args:
        model: Model of the engine that is being built.
        rules: Classes, names, name suffixes and granularity of leaf modules.

    Raises:
        ConfigError: A choice that the config states matches no module.
    """
    leaves: list[nn.Module] = []
    for key, choices in (
        ("classes", rules.classes),
        ("names", rules.names),
        ("name_suffixes", rules.name_suffixes),
    ):
        for choice in choices:
            found = matching_modules(model, choice)
            leaves += found
            if not found and key in rules.stated:
                expected = "no module of the model matches"
                hint = "give a class's name, a module's full name, or the end of one"
                raise ConfigError([Problem(f"zero_optimization.leaf_module.{key}", choice, expected, hint)])
    if rules.granularity:
        leaves += _fine_grained(model, rules.granularity)
    set_configured_leaves(model, leaves)


def granularity(module: nn.Module) -> int | None:
    """Return the mean number of parameters of the modules inside a module, DeepSpeed's measure of fine-grained modules.

    `stage3_module_granularity_threshold` finds mixture-of-experts blocks by it.

    Args:
        module: Module to measure.

    Returns:
        Elements of all parameters, divided by the number of modules with parameters (itself included) and rounded down.
        None if it cannot be a leaf by this measure: it has no module inside or no parameter, it is a container (which
        need not be called), or it has more than 1e9 elements.
    """
    numel = sum(parameter.numel() for parameter in module.parameters())
    is_simple = next(module.children(), None) is None
    if is_simple or isinstance(module, _CONTAINERS) or not 0 < numel <= _MAX_LEAF_NUMEL:
        return None
    parts = [
        part for part in module.modules() if type(part) not in _CONTAINERS and any(True for _ in part.parameters())
    ]
    return numel // len(parts)


def fine_grained_modules(model: nn.Module, threshold: int) -> Iterator[nn.Module]:
    """Find the outermost modules with a small granularity.

    Args:
        model: Model to search, itself included.
        threshold: Largest `granularity`, in elements.

    Yields:
        Modules, none of which is inside another.
    """
    own = granularity(model)
    if own is not None and own <= threshold:
        yield model
        return
    for child in model.children():
        yield from fine_grained_modules(child, threshold)


def _fine_grained(model: nn.Module, threshold: int) -> list[nn.Module]:
    """`fine_grained_modules`, and a warning when there are none."""
    found = list(fine_grained_modules(model, threshold))
    if not found:
        finest = min((own for part in model.modules() if (own := granularity(part)) is not None), default=None)
        log.warning(
            "zero_optimization.stage3_module_granularity_threshold = %d makes no leaf module: %s",
            threshold,
            "no module is made of modules" if finest is None else f"the finest module has a granularity of {finest}",
        )
    return found


def _matches(name: str, module: nn.Module, choice: ModuleChoice) -> bool:
    if isinstance(choice, type):
        return isinstance(module, choice)
    kind = type(module)
    names = (name, kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}")
    return choice in names or name.endswith(f".{choice}")
