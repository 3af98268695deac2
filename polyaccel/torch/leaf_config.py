"""The leaf modules that a config asks for: those it lists, and those finer than its threshold."""

from __future__ import annotations

from collections.abc import Iterator
from logging import getLogger

from torch import nn
from torch.nn.modules import container

from polyaccel.config.zero import ZeroConfig
from polyaccel.errors import ConfigError, Problem
from polyaccel.torch.leaf_modules import matching_modules, set_configured_leaves

log = getLogger(__name__)

_MAX_LEAF_NUMEL = 10**9
"""A larger module is never a leaf by its granularity: all of it would be live at once."""
_CONTAINERS = tuple(getattr(container, name) for name in container.__all__)


def mark_configured_leaves(model: nn.Module, zero: ZeroConfig) -> None:
    """Mark the leaf modules of `leaf_module` and `stage3_module_granularity_threshold` in `model`, and those alone.

    Raises ConfigError for a choice that is stated and matches nothing.
    """
    section = zero.leaf_module
    leaves: list[nn.Module] = []
    for key, choices in (
        ("classes", section.classes),
        ("names", section.names),
        ("name_suffixes", section.name_suffixes),
    ):
        for choice in choices:
            found = matching_modules(model, choice)
            leaves += found
            if not found and key in section.model_fields_set:
                expected = "no module of the model matches"
                cure = "give a class's name, a module's full name, or the end of one"
                raise ConfigError([Problem(f"zero_optimization.leaf_module.{key}", choice, expected, cure)])
    if zero.module_granularity_threshold:
        leaves += _fine_grained(model, zero.module_granularity_threshold)
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
