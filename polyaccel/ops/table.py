"""`by_op`: the kernel table of functions that have the names of ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyaccel.ops.base import ALL_OPS, Op


def by_op(*kernels: Callable[..., Any]) -> dict[Op[Any], Callable[..., Any]]:
    """Return each of `kernels` under the op of its name."""
    ops = {op.name: op for op in ALL_OPS}
    return {ops[kernel.__name__]: kernel for kernel in kernels}
