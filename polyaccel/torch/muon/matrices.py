"""Which matrices a parameter of Muon's is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

from polyaccel.core.block import Block


@dataclass(frozen=True, slots=True)
class Matrices:
    """`count` matrices of `rows` and `columns`, one after the other in the parameter's memory.

    `height` and `width` are what the scale of an update follows from: of a convolution, the last two dimensions.
    """

    count: int
    rows: int
    columns: int
    height: int
    width: int

    @property
    def numel(self) -> int:
        """Elements of one matrix."""
        return self.rows * self.columns

    def scale(self, rule: str) -> float:
        """Return the factor of an update, by the name that torch.optim.Muon has for its rule."""
        if rule == "match_rms_adamw":
            return 0.2 * sqrt(max(self.rows, self.columns))
        return sqrt(max(1.0, self.height / self.width))


def matrices_of(shape: Sequence[int], head_rows: int = 0) -> Matrices:
    """Return the matrices of a parameter of `shape`.

    A filter of a convolution is the matrix of its first dimension and the rest. Other leading dimensions count
    matrices. With `head_rows`, so many rows are a matrix: those of an attention head.
    """
    height, width = max(1, shape[-2]), max(1, shape[-1])
    if len(shape) == 4:
        return Matrices(1, shape[0], prod(shape[1:]), height, width)
    if head_rows and len(shape) == 2 and shape[0] % head_rows == 0:
        return Matrices(shape[0] // head_rows, head_rows, shape[1], head_rows, width)
    return Matrices(prod(shape[:-2]), shape[-2], shape[-1], height, width)


def cuts_matrices(block: Block, head_rows: int = 0) -> bool:
    """Whether a rank with `block` of a parameter has parts of matrices."""
    whole = [runs == ((0, length),) for length, runs in zip(block.shape, block.runs, strict=True)]
    if len(block.shape) == 4:
        return not all(whole)
    if head_rows and len(block.shape) == 2 and block.shape[0] % head_rows == 0:
        parts = [part for run in block.runs[0] for part in run]
        return not whole[1] or any(part % head_rows for part in parts)
    return not all(whole[-2:])


def rule_of(group: Mapping[str, Any]) -> str:
    """Return the rule of an update's scale in an optimizer group."""
    return str(group.get("adjust_lr_fn", "original"))
