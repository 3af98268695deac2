"""The kernels on torch and on numpy beyond the contract: any cut and any thread count give the same bits, and torch
agrees."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.types import DType
from polyaccel.errors import PluginContractError, ShardingError
from polyaccel.ops.base import ALL_OPS, SCALE, SQUARE_SUMS, UPDATE, KernelTable
from polyaccel.ops.block_codes import BLOCK_CODE_OPS
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.ops.recorded import RECORDED_UPDATE
from polyaccel.ops.rows import ROW_OPS
from polyaccel.ops.torch import kernels as torch_kernels
from polyaccel.testkit.kernels.cases import KernelCase, kernel_cases
from polyaccel.testkit.kernels.contract import check_meaning, check_slices

TORCH, NUMPY = CpuAccelerator("torch", native=False), CpuAccelerator("numpy", native=False)
OPTIMIZER_CASES = [case for case in kernel_cases(frozenset(DType)) if len(case.arguments) > 2]
ADAMW = OPTIMIZERS["AdamW"].rule({"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, 3)


@st.composite
def cut_cases(draw: st.DrawFn) -> tuple[Accelerator, KernelCase, int, list[int]]:
    accelerator = draw(st.sampled_from([TORCH, NUMPY]))
    possible = [c for c in OPTIMIZER_CASES if {a.dtype for a in c.arguments} <= accelerator.supported_dtypes()]
    numel = draw(st.integers(0, 700))
    cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=4)))
    return accelerator, draw(st.sampled_from(possible)), numel, cuts


@settings(max_examples=150, deadline=None)
@given(cut_cases(), st.integers(0, 3))
def test_an_update_is_bitwise_that_of_its_pieces(
    cut: tuple[Accelerator, KernelCase, int, list[int]], seed: int
) -> None:
    accelerator, case, numel, cuts = cut
    check_slices(accelerator, case, numel, cuts, seed=seed)


@pytest.mark.parametrize("case", [c for c in OPTIMIZER_CASES if c.name.startswith("adamw")], ids=str)
def test_pieces_of_more_than_a_chunk_agree_with_the_whole(case: KernelCase) -> None:
    check_slices(TORCH, case, (1 << 18) + 1000, [333, (1 << 17) + 5, 1 << 18])


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("case", [c for c in OPTIMIZER_CASES if "float32 x 0.3" in c.name], ids=str)
def test_threads_share_out_work_without_changing_a_bit(case: KernelCase) -> None:
    # The whole is cut by torch into three shares at odd places; the pieces are too small to be.
    numel = 100_001
    check_slices(TORCH, case, numel, list(range(20_000, numel, 20_000)))


def test_devices_without_a_fused_adam_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "_FUSED_ADAM_DEVICE", "")
    for case in OPTIMIZER_CASES:
        if case.kernel in ("update adamw", "update adam"):
            check_meaning(TORCH, case, 1003)
            check_slices(TORCH, case, 1003, [7, 500])


def test_a_plain_step_works_in_place_on_the_callers_memory() -> None:
    buffers = [TORCH.allocate(64, DType.FLOAT32) for _ in range(4)]
    for buffer in buffers:
        buffer.fill(0.5)
    addresses = [buffer.data_ptr() for buffer in buffers]
    TORCH.kernels()[UPDATE](ADAMW, buffers[0], buffers[1], buffers[2:])
    assert [buffer.data_ptr() for buffer in buffers] == addresses
    assert all((buffer.raw != 0.5).all() for buffer in (buffers[0], buffers[3]))


def test_square_sums_of_a_piece_do_not_depend_on_its_place() -> None:
    values = torch.randn(1 << 19, generator=torch.Generator().manual_seed(3))
    out = TORCH.allocate(3, DType.FLOAT64)
    pieces = []
    for index, shift in enumerate((0, 3, 17)):
        room = torch.zeros(values.numel() + shift)
        room[shift:] = values
        pieces.append((index, TORCH.wrap(room).view(shift, values.numel())))
    TORCH.kernels()[SQUARE_SUMS](out, pieces)
    assert len(set(out.raw.tolist())) == 1
    np.testing.assert_allclose(out.raw[0].item(), values.double().square().sum().item(), rtol=1e-14)


@pytest.mark.parametrize("accelerator", [TORCH, NUMPY], ids=["torch", "numpy"])
def test_buffers_of_other_lengths_are_refused(accelerator: CpuAccelerator) -> None:
    buffers = [accelerator.allocate(8, DType.FLOAT32) for _ in range(3)]
    short = accelerator.allocate(7, DType.FLOAT32)
    with pytest.raises(ShardingError) as caught:
        accelerator.kernels()[UPDATE](ADAMW, buffers[0], buffers[1], [buffers[2], short])
    assert caught.value.value == 7
    assert "float32" in str(caught.value)


@pytest.mark.parametrize("accelerator", [TORCH, NUMPY], ids=["torch", "numpy"])
def test_integers_are_not_scaled(accelerator: CpuAccelerator) -> None:
    with pytest.raises(ShardingError) as caught:
        accelerator.kernels()[SCALE](accelerator.allocate(3, DType.INT32), 0.5)
    assert caught.value.value == "int32"


def test_a_table_names_who_provides_what() -> None:
    def other(*args: object) -> None:
        raise NotImplementedError

    table = TORCH.kernels().replaced("acme", {UPDATE: other})
    assert table[UPDATE] is other
    assert (table.provider(UPDATE), table.provider(SCALE)) == ("acme", "torch")
    assert set(table) == {*ALL_OPS, *ROW_OPS, *BLOCK_CODE_OPS, RECORDED_UPDATE}
    with pytest.raises(PluginContractError) as caught:
        KernelTable("acme", {UPDATE: other})[SCALE]
    assert caught.value.value == "scale"
