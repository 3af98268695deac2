"""Kernels of `ROW_OPS` on torch tensors, on any device that torch supports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyaccel.core.buffer import Buffer
from polyaccel.ops.base import Op
from polyaccel.ops.rows import MERGE_ROWS, PUT_ROWS, TAKE_ROWS


def merge_rows(indices: Buffer) -> int:
    """Implement `MergeRowsFn`."""
    found: torch.Tensor = indices.raw.unique()
    indices.raw[: found.numel()] = found
    indices.bump_version()
    return found.numel()


def take_rows(out: Buffer, source: Buffer, indices: Buffer, width: int) -> None:
    """Implement `TakeRowsFn`."""
    torch.index_select(source.raw.view(-1, width), 0, indices.raw, out=out.raw.view(-1, width))
    out.bump_version()


def put_rows(target: Buffer, rows: Buffer, indices: Buffer, width: int) -> None:
    """Implement `PutRowsFn`."""
    target.raw.view(-1, width).index_copy_(0, indices.raw, rows.raw.view(-1, width))
    target.bump_version()


ROW_KERNELS: dict[Op[Any], Callable[..., Any]] = {
    MERGE_ROWS: merge_rows,
    TAKE_ROWS: take_rows,
    PUT_ROWS: put_rows,
}
