"""Modules that are gathered as one, wherever they stand: mixture-of-experts blocks, whose ranks use different experts.

DeepSpeed's name for them is *leaf modules*. A mark on the module says so: one that callers set before `initialize`, or
one that `initialize` sets for its config, which goes with the engine.
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
            hint="give a class, its name, a module's full name, or the end of one",
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
        home = record_of(parameter)
        if home is not None and home.owner is not None and home.owner.is_sharded(home.fqn):
            raise ShardingError(
                f"parameter {name!r} is sharded already", hint="choose units before polyaccel.initialize", value=name
            )


# The leaves that a config asks for: those it lists, and those finer than its threshold.


def mark_configured_leaves(model: nn.Module, rules: LeafRules) -> None:
    """Mark the leaf modules of `rules` in `model`, and those alone.

    Raises ConfigError for a choice that is stated and matches nothing.
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
    """Parameters of `module` for each of the modules with parameters that it consists of, itself included; rounded
    down. None for one that cannot be a leaf by it: without modules inside, without parameters, a container (which need
    not be called itself), or above 1e9 elements.

    DeepSpeed's measure, by which `stage3_module_granularity_threshold` finds mixture-of-experts blocks.
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
    """The outermost modules whose granularity is `threshold` or less."""
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
