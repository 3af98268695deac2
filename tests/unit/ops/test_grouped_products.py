"""Products of many experts' rows in one call: on every instruction set, whatever lies beside a row, for any threads."""

from __future__ import annotations

import pytest
import torch

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.errors import ShardingError
from polyaccel.ops.base import GROUPED_INPUT_GRAD, GROUPED_LINEAR, GROUPED_WEIGHT_GRAD, KernelTable
from polyaccel.ops.torch.grouped import with_grouped_kernels
from polyaccel.testkit.kernels.grouped import check_grouped_products


@pytest.fixture
def table(isa: str) -> KernelTable:
    """The grouped products on each instruction set that this processor has."""
    return with_grouped_kernels(KernelTable("none", {}))


@pytest.mark.parametrize(
    ("counts", "inputs", "outputs"),
    [((1,), 1, 1), ((0, 3, 0, 17), 5, 33), ((14, 1, 29), 16, 32), ((64, 1, 130), 70, 65), ((0, 0), 4, 4)],
    ids=str,
)
def test_they_mean_what_the_reference_says_and_rows_are_independent(table, counts, inputs, outputs):
    check_grouped_products(CpuAccelerator("torch"), table, counts, inputs, outputs)


def test_threads_and_strides_change_no_bit(table):
    torch.manual_seed(0)
    counts = (31, 0, 70)
    rows, weights, grad = torch.randn(101, 40), torch.randn(3, 50, 40), torch.randn(101, 50)
    parts = [(11, 20), (0, 0), (70, 0)]

    def run() -> list[torch.Tensor]:
        return [
            table[GROUPED_LINEAR](rows, weights, counts),
            table[GROUPED_LINEAR](rows, weights.transpose(1, 2).contiguous().transpose(1, 2), counts),
            table[GROUPED_INPUT_GRAD](grad, weights, counts),
            table[GROUPED_WEIGHT_GRAD](grad, rows, parts),
        ]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run()
        torch.set_num_threads(3)
        three = run()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
    assert torch.equal(one[0], one[1])
    assert not one[3][1].any()


@pytest.mark.parametrize(
    ("rows", "weights", "counts"),
    [
        (torch.zeros(3, 4), torch.zeros(2, 5, 4), (1, 1)),
        (torch.zeros(3, 4), torch.zeros(2, 5, 6), (1, 2)),
        (torch.zeros(3, 4), torch.zeros(2, 5, 4), (4, -1)),
        (torch.zeros(3, 4, dtype=torch.float64), torch.zeros(2, 5, 4), (1, 2)),
    ],
    ids=("too few rows", "other inputs", "a negative count", "another type"),
)
def test_what_does_not_fit_is_refused(rows, weights, counts):
    table = with_grouped_kernels(KernelTable("none", {}))
    if not set(table):
        pytest.skip("csrc was not compiled")
    with pytest.raises(ShardingError):
        table[GROUPED_LINEAR](rows, weights, counts)
