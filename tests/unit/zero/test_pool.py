"""Buffers that are borrowed and given back: what a pool keeps, and for whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.collectives.single import SingleCommunicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.zero.plan.pool import BufferPool


def pool(max_numel: int | None = None) -> BufferPool[Buffer]:
    return BufferPool(SingleCommunicator(CpuAccelerator("numpy"), timeout_s=1.0).allocate, max_numel)


def test_the_smallest_buffer_that_fits_serves_again() -> None:
    lender = pool()
    large, small = lender.acquire(100, DType.FLOAT32), lender.acquire(50, DType.FLOAT32)
    addresses = large.data_ptr(), small.data_ptr()
    lender.release(large)
    lender.release(small)
    assert lender.in_use_count == 0
    again = lender.acquire(40, DType.FLOAT32)
    assert (again.numel, again.data_ptr()) == (40, addresses[1])
    assert lender.acquire(40, DType.FLOAT32).data_ptr() == addresses[0]
    assert lender.held_numel == 150


def test_a_buffer_that_is_too_small_is_replaced() -> None:
    lender = pool()
    lender.release(lender.acquire(50, DType.FLOAT32))
    lender.acquire(100, DType.FLOAT32)
    assert lender.held_numel == 100


def test_types_do_not_mix() -> None:
    lender = pool()
    lender.release(lender.acquire(100, DType.FLOAT32))
    assert lender.acquire(100, DType.FLOAT16).dtype is DType.FLOAT16
    assert lender.held_numel == 200


def test_a_bounded_pool_lends_a_buffer_to_its_like_only() -> None:
    lender = pool(300)
    large = lender.acquire(200, DType.FLOAT32)
    address = large.data_ptr()
    lender.release(large)
    lender.acquire(50, DType.FLOAT32)
    assert lender.held_numel == 250
    assert lender.acquire(200, DType.FLOAT32).data_ptr() == address


def test_what_must_be_lent_at_once_is_lent() -> None:
    lender = pool(100)
    borrowed = [lender.acquire(80, DType.FLOAT32) for _ in range(2)]
    assert lender.held_numel == 160
    for buffer in borrowed:
        lender.release(buffer)
    lender.acquire(10, DType.FLOAT32)
    assert lender.held_numel <= 100


@given(st.lists(st.tuples(st.integers(1, 60), st.sampled_from([DType.FLOAT32, DType.FLOAT16])), max_size=30))
def test_the_bound_holds_while_what_is_lent_allows_it(needs: list[tuple[int, DType]]) -> None:
    lender = pool(100)
    lent = []
    for numel, dtype in needs:
        while sum(buffer.numel for buffer in lent) + numel > 100:
            lender.release(lent.pop(0))
        lent.append(lender.acquire(numel, dtype))
        assert lender.held_numel <= 100


@pytest.mark.parametrize("max_numel", [None, 500])
def test_a_buffer_that_was_not_lent_is_not_taken(max_numel: int | None) -> None:
    lender = pool(max_numel)
    buffer = lender.acquire(10, DType.FLOAT32)
    lender.release(buffer)
    with pytest.raises(KeyError):
        lender.release(buffer)


def test_trimming_lets_go_of_what_nobody_borrows() -> None:
    lender = pool()
    kept, idle = lender.acquire(10, DType.FLOAT32), lender.acquire(20, DType.FLOAT32)
    lender.release(idle)
    lender.trim()
    assert lender.held_numel == 10
    lender.release(kept)
    assert lender.acquire(10, DType.FLOAT32).data_ptr() == kept.data_ptr()
