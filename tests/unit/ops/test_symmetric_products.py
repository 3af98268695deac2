"""Products that are known to be symmetric: on every instruction set, for any strides and threads, and without csrc."""

from __future__ import annotations

import pytest
import torch

from polyaccel.ops.torch.symmetric import symmetric_product


def symmetric(size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return (matrix + matrix.T) / 2


def check(size: int, inner: int, dtype: torch.dtype = torch.float32) -> None:
    wide = torch.randn(size, inner, generator=torch.Generator().manual_seed(1), dtype=dtype)
    tall, added = wide.T.contiguous().T, symmetric(size, 2, dtype)
    exact = wide.double() @ wide.double().T
    bound = 1e-6 if dtype is torch.float32 else 1e-14
    for left in (wide, tall):
        found = symmetric_product(None, left, left.T)
        assert (found - found.T).norm() <= bound * exact.norm()
        assert (found - exact).norm() <= bound * exact.norm()
        found = symmetric_product(None, left, left.T, alpha=0.25)
        assert (found - 0.25 * exact).norm() <= bound * exact.norm()
        found = symmetric_product(added, left, left.T, -2.0, 0.5)
        assert (found - (0.5 * exact - 2 * added.double())).norm() <= bound * exact.norm()


@pytest.mark.parametrize(("size", "inner"), [(64, 64), (77, 5), (130, 200)])
def test_they_are_the_products_of_float64(isa: str, size: int, inner: int) -> None:
    check(size, inner)
    one = symmetric(size, 4)
    square = symmetric_product(None, one, one)
    assert torch.equal(square, square.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_computes_those_that_csrc_does_not(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyaccel.ops.torch.symmetric._LEAST_SIZE", 10**6)
    check(40, 3, dtype)
    check(300, 70, dtype)


def test_threads_change_no_bit_and_infinities_stay() -> None:
    one, before = symmetric(150, 3), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = symmetric_product(one, one, one, 1.0, 2.0)
        torch.set_num_threads(3)
        assert torch.equal(alone, symmetric_product(one, one, one, 1.0, 2.0))
    finally:
        torch.set_num_threads(before)
    one[0, 0] = float("inf")
    assert not symmetric_product(None, one, one).isfinite().all()


def test_batches_and_small_ones_are_those_of_torch() -> None:
    batch = torch.stack([symmetric(20, seed) for seed in range(3)])
    assert torch.equal(symmetric_product(None, batch, batch), batch @ batch)
    assert torch.equal(symmetric_product(batch, batch, batch, 2.0), torch.baddbmm(batch, batch, batch, beta=2.0))
