"""Which linear layers multiply in 8 or 4 bits, by which recipe."""

from __future__ import annotations

from dataclasses import dataclass

from polyaccel.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecisionPolicy:
    """The recipe of layers that `modules` find by their names, and `excluded` do not."""

    recipe: str
    modules: tuple[str, ...]
    excluded: tuple[str, ...]


def low_precision_policy_of(config: Config) -> LowPrecisionPolicy | None:
    """The rule of the section `low_precision_linear`; None where it is off."""
    section = config.low_precision_linear
    if section.recipe is None:
        return None
    return LowPrecisionPolicy(recipe=section.recipe, modules=section.modules, excluded=section.excluded_modules)
