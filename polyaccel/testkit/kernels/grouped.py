"""The check of grouped products: against their float64 meaning, and that a row's bits depend on no other row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.types import DType
from polyaccel.ops import reference
from polyaccel.ops.base import GROUPED_INPUT_GRAD, GROUPED_LINEAR, GROUPED_WEIGHT_GRAD, KernelTable, Op
from polyaccel.ops.reference import Float64s
from polyaccel.testkit.comparison import equal, same_numbers
from polyaccel.testkit.kernels.contract import encode
from polyaccel.testkit.progress import doing

_EPSILON = 2.0**-23


def check_grouped_products(
    accelerator: Accelerator, table: KernelTable, counts: Sequence[int], inputs: int, outputs: int, *, seed: int = 0
) -> None:
    """The grouped products of `table` equal the reference's for groups of `counts` rows; rows that are given alone, and
    parts of groups, have the bits that they have among others."""
    what = f"groups of {list(counts)} rows, {inputs} inputs, {outputs} outputs"
    doing(f"grouped products: {what}")
    draw = np.random.default_rng(seed)
    total, groups = sum(counts), len(counts)
    rows, exact_rows = _array(accelerator, draw.standard_normal((total, inputs)))
    grad, exact_grad = _array(accelerator, draw.standard_normal((total, outputs)))
    weights, exact_weights = _array(accelerator, draw.standard_normal((groups, outputs, inputs)))

    calls: tuple[tuple[Op[Any], Any, Any, Float64s, int], ...] = (
        (GROUPED_LINEAR, reference.grouped_linear, rows, exact_rows, inputs),
        (GROUPED_INPUT_GRAD, reference.grouped_input_grad, grad, exact_grad, outputs),
    )
    for op, meaning, given, exact, summed in calls:
        kernel = table[op]
        made = kernel(given, weights, counts)
        found = _numbers(accelerator, made)
        if op is GROUPED_LINEAR:
            into = _numbers(accelerator, kernel(given, weights, counts, out=made * 0))
            equal(into.tobytes(), found.tobytes(), f"{op.name}, {what}: into memory that is there")
        room = summed * _EPSILON * meaning(np.abs(exact), np.abs(exact_weights), counts)
        _close(found, meaning(exact, exact_weights, counts), room, f"{op.name}, {what}")
        first = 0
        for group, count in enumerate(counts):
            for row in {first, first + count // 2, first + count - 1} if count else ():
                alone = [int(other == group) for other in range(groups)]
                again = _numbers(accelerator, kernel(given[row : row + 1], weights, alone))
                equal(again.tobytes(), found[row : row + 1].tobytes(), f"{op.name}, {what}: row {row} alone")
            first += count

    parts = [(count // 3, 0, count - count // 3) for count in counts]
    found = _numbers(accelerator, table[GROUPED_WEIGHT_GRAD](grad, rows, parts))
    sums = reference.grouped_weight_grad(np.abs(exact_grad), np.abs(exact_rows), parts)
    meant = reference.grouped_weight_grad(exact_grad, exact_rows, parts)
    _close(found, meant, max(counts) * _EPSILON * sums, f"grouped_weight_grad, {what}")
    added = np.zeros_like(found)
    first = 0
    for group, of_group in enumerate(parts):
        for count in of_group:
            at = slice(first, first + count)
            of_one = [[count] if other == group else [0] for other in range(groups)]
            added += _numbers(accelerator, table[GROUPED_WEIGHT_GRAD](grad[at], rows[at], of_one))
            first += count
    equal(added.tobytes(), found.tobytes(), f"grouped_weight_grad, {what}: its parts one by one")


def _array(accelerator: Accelerator, values: Float64s) -> tuple[Any, Float64s]:
    """The framework's array of float32, and what it holds."""
    buffer = accelerator.allocate(values.size, DType.FLOAT32)
    buffer.from_bytes(encode(values.reshape(-1), DType.FLOAT32))
    return buffer.raw.reshape(values.shape), reference.to_float64(buffer.to_bytes(), DType.FLOAT32).reshape(
        values.shape
    )


def _numbers(accelerator: Accelerator, array: Any) -> Any:
    values = np.frombuffer(accelerator.wrap(array.reshape(-1)).to_bytes(), np.float32)
    return values.reshape(tuple(array.shape))


def _close(found: Any, meant: Float64s, room: Float64s, what: str) -> None:
    equal(found.shape, meant.shape, f"{what}, shape")
    same_numbers(np.maximum(np.abs(found - meant) - room, 0.0), np.zeros(meant.shape), f"{what}: beyond rounding")
