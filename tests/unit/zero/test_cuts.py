"""Views that are cut once for each buffer, and forgotten with it."""

from __future__ import annotations

import gc
from weakref import ref

import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.backends.local.backend import LocalWorld
from polyaccel.core.buffer import BufferViews
from polyaccel.core.types import DType
from polyaccel.zero.plan.pool import BufferPool

memories = pytest.mark.parametrize("accelerator", [CpuAccelerator("numpy"), CpuAccelerator("torch")])


@memories
def test_a_buffer_is_cut_once_and_each_buffer_for_itself(accelerator):
    cuts = BufferViews([(0, 4), (16, 2)])
    one, other = (accelerator.allocate(32, DType.FLOAT32) for _ in range(2))
    views = cuts.get_views(one)
    assert [(view.data_ptr() - one.data_ptr(), view.numel) for view in views] == [(0, 4), (64, 2)]
    assert cuts.get_views(other)[1].data_ptr() == other.data_ptr() + 64
    assert cuts.get_views(one) is views


@memories
def test_views_keep_no_memory_that_its_owner_let_go(accelerator):
    cuts = BufferViews([(0, 4)])
    pool = BufferPool(LocalWorld(1, accelerator).communicators[0].allocate)
    lent = pool.acquire(32, DType.FLOAT32)
    view = ref(cuts.get_views(lent)[0])
    pool.release(lent)
    assert cuts.get_views(pool.acquire(32, DType.FLOAT32))[0] is view()  # lent again, it is the same buffer
    pool.release(lent)
    pool.trim()
    del lent
    gc.collect()
    assert view() is None
