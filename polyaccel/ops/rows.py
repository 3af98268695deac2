"""The operations on rows of a matrix, by which gradients of embeddings travel where few of their rows are not zero.

Accelerators whose kernel table lacks one of `ROW_OPS` exchange whole gradients.
"""

from __future__ import annotations

from typing import Any, Protocol

from polyaccel.core.buffer import Buffer
from polyaccel.ops.base import Op


class MergeRowsFn(Protocol):
    def __call__(self, indices: Buffer) -> int:
        """Sort row numbers, and drop repeated ones.

        Args:
            indices: Row numbers, int64. The first ones are overwritten with each number once, in ascending order.

        Returns:
            How many there are.
        """


class TakeRowsFn(Protocol):
    def __call__(self, out: Buffer, source: Buffer, indices: Buffer, width: int) -> None:
        """Copy the rows of `source` that `indices` names to `out`, one after another.

        Args:
            out: Overwritten: `indices.numel * width` elements of `source`'s type.
            source: Rows of `width` elements.
            indices: Row numbers, int64.
            width: Elements of a row.
        """


class PutRowsFn(Protocol):
    def __call__(self, target: Buffer, rows: Buffer, indices: Buffer, width: int) -> None:
        """Overwrite the rows of `target` that `indices` names.

        Args:
            target: Rows of `width` elements.
            rows: `indices.numel * width` elements of `target`'s type.
            indices: Row numbers, int64, each at most once.
            width: Elements of a row.
        """


MERGE_ROWS: Op[MergeRowsFn] = Op("merge_rows", "row numbers in ascending order, each once")
TAKE_ROWS: Op[TakeRowsFn] = Op("take_rows", "copy some rows of a matrix together")
PUT_ROWS: Op[PutRowsFn] = Op("put_rows", "overwrite some rows of a matrix")

ROW_OPS: tuple[Op[Any], ...] = (MERGE_ROWS, TAKE_ROWS, PUT_ROWS)
"""The ops of which an accelerator's kernel table has all or none."""
