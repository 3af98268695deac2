"""The section about matrix products of linear layers in 8 or 4 bits: `low_precision_linear`."""

from __future__ import annotations

from typing import Literal

from polyaccel.config.section import Listed, Section

LowPrecisionRecipe = Literal["tensorwise", "rowwise", "mxfp8", "mxfp4"]


class LowPrecisionLinearConfig(Section):
    """Linear layers whose three products have operands in 8 or 4 bits. Torch only."""

    recipe: LowPrecisionRecipe | None = None
    """Scales and types of operands, by torchao's names: float8 with a scale a tensor or a row, or blocks of 32 elements
    with a power of two (MX) in 8 or 4 bits. Null multiplies in the type of the parameters."""
    modules: Listed[tuple[str, ...]] = ("*",)
    """Regular expressions that are found in full names of layers; "*" is every linear layer."""
    excluded_modules: Listed[tuple[str, ...]] = ()
    """Regular expressions that are found in full names of layers that are left as they are, as "lm_head"."""
