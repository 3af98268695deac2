"""The optimizers that a config calls by name, on slices."""

from __future__ import annotations

from typing import Literal

from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.zero.update.narrow_states import BlockStates, RoundedStates
from polyaccel.zero.update.optimizers import ElementwiseOptimizer, ScheduleFree, SliceOptimizer, TrustRatioOptimizer

StateBits = Literal[8, 16, 32]


def slice_optimizer(name: str, state_bits: StateBits = 32) -> SliceOptimizer:
    """A new optimizer of `polyaccel.ops.optimizers`, by the name that a resolved config uses.

    `state_bits` below 32 are those of states of elementwise optimizers: 16 in bfloat16, 8 in blocks.
    """
    row = OPTIMIZERS[name]
    if "max_coeff" in row.keys:
        return TrustRatioOptimizer(row)
    if state_bits == 8:
        return BlockStates(row)
    if row.kind == ScheduleFree.name:
        return ScheduleFree(row)
    return RoundedStates(row) if state_bits == 16 else ElementwiseOptimizer(row)
