"""Adding up pieces in rank order, whichever of them the result is written over, and scratch memory used again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.collectives.reduction import reduce_parts
from polyaccel.comm.collectives.scratch import ScratchPool
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp

CPU = CpuAccelerator("numpy")
HALF_CHUNK = 1 << 15


def filled(values: np.ndarray, dtype: DType) -> Buffer:
    buffer = CPU.allocate(values.size, dtype)
    buffer.from_bytes(values.astype(dtype.value).tobytes())
    return buffer


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.sampled_from([1, 5, HALF_CHUNK * 2 + 3]),
    st.sampled_from([DType.FLOAT32, DType.FLOAT16]),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([ReduceOp.SUM, ReduceOp.AVG]),
)
def test_the_result_is_the_sum_in_rank_order(
    count: int, numel: int, dtype: DType, target: int | None, op: ReduceOp
) -> None:
    rng = np.random.default_rng(count * numel)
    terms = [rng.standard_normal(numel).astype(dtype.value) for _ in range(count)]
    parts = [filled(term, dtype) for term in terms]
    out = parts[target] if target is not None and target < count else CPU.allocate(numel, dtype)
    reduce_parts(CPU, parts, out, op)
    total = terms[0].astype(np.float32)
    for term in terms[1:]:
        total = total + term.astype(np.float32)
    if op is ReduceOp.AVG and count > 1:
        total = total * np.float32(1 / count)
    assert np.array_equal(np.frombuffer(out.to_bytes(), dtype.value), total.astype(dtype.value))


@pytest.mark.parametrize("op", [ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PROD])
def test_other_reductions(op: ReduceOp) -> None:
    out = CPU.allocate(2, DType.INT32)
    reduce_parts(CPU, [filled(np.array(pair), DType.INT32) for pair in ([2, 9], [7, 3], [5, 4])], out, op)
    expected = {ReduceOp.MAX: [7, 9], ReduceOp.MIN: [2, 3], ReduceOp.PROD: [70, 108]}[op]
    assert np.frombuffer(out.to_bytes(), "int32").tolist() == expected


def test_scratch_is_used_again_and_does_not_pile_up() -> None:
    pool = ScratchPool(CPU)
    small = pool.take(10, DType.FLOAT32)
    pool.give_back(small)
    assert pool.take(500, DType.FLOAT32) is small
    pool.give_back(small)
    large = pool.take(small.numel + 1, DType.FLOAT32)
    assert large is not small
    pool.give_back(large)
    assert pool.take(10, DType.FLOAT32) is large  # the small one was replaced
    assert pool.take(10, DType.FLOAT32) is not large
