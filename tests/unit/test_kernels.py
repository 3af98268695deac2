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
from polyaccel.errors import PluginContractError, ShardingError
from polyaccel.ops import torch_kernels
from polyaccel.ops.base import (
    ADAGRAD,
    ADAM,
    ALL_OPS,
    SCALE,
    SGD,
    SQUARE_SUMS,
    AdagradHyper,
    AdamHyper,
    KernelTable,
    SgdHyper,
)
from polyaccel.testkit.kernel_cases import KernelCase, kernel_cases
from polyaccel.testkit.kernels import check_meaning, check_slices
from polyaccel.types import DType

TORCH, NUMPY = CpuAccelerator("torch", native=False), CpuAccelerator("numpy", native=False)
OPTIMIZER_CASES = [case for case in kernel_cases(frozenset(DType)) if len(case.arguments) > 2]
HYPER = AdamHyper(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3)


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


def test_adam_follows_torchs_own_optimizers() -> None:
    for optimizer_class, decoupled in ((torch.optim.AdamW, True), (torch.optim.Adam, False)):
        generator = torch.Generator().manual_seed(1)
        weight = torch.nn.Parameter(torch.randn(101, generator=generator))
        theirs = optimizer_class([weight], lr=0.01, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1)
        ours = [TORCH.wrap(weight.detach().clone()), *(TORCH.allocate(101, DType.FLOAT32) for _ in range(3))]
        for step in range(1, 6):
            weight.grad = torch.randn(101, generator=generator)
            ours[1].copy_from(TORCH.wrap(weight.grad))
            theirs.step()
            hyper = AdamHyper(0.01, 0.9, 0.95, 1e-7, 0.1, step, decoupled=decoupled)
            TORCH.kernels()[ADAM](ours[0], ours[1], ours[2], ours[3], None, hyper, 1.0)
        torch.testing.assert_close(ours[0].raw, weight.detach(), rtol=2e-6, atol=2e-7)


def test_sgd_and_adagrad_follow_torchs_own_optimizers() -> None:
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(77, generator=generator)
    sgd_weight, adagrad_weight = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([sgd_weight], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    adagrad = torch.optim.Adagrad([adagrad_weight], lr=0.1, lr_decay=0.2, weight_decay=0.01)
    first, second = TORCH.wrap(start.clone()), TORCH.wrap(start.clone())
    momentum, total = TORCH.allocate(77, DType.FLOAT32), TORCH.allocate(77, DType.FLOAT32)
    table = TORCH.kernels()
    for step in range(1, 5):
        grad = torch.randn(77, generator=generator)
        sgd_weight.grad, adagrad_weight.grad = grad.clone(), grad.clone()
        sgd.step()
        adagrad.step()
        hyper = SgdHyper(0.1, 0.9, 0.0, 0.01, nesterov=True, first=step == 1)
        table[SGD](first, TORCH.wrap(grad.clone()), momentum, None, hyper, 1.0)
        table[ADAGRAD](second, TORCH.wrap(grad), total, None, AdagradHyper(0.1, 1e-10, 0.01, 0.2, step), 1.0)
    torch.testing.assert_close(first.raw, sgd_weight.detach(), rtol=2e-6, atol=2e-7)
    torch.testing.assert_close(second.raw, adagrad_weight.detach(), rtol=2e-6, atol=2e-7)


def test_devices_without_a_fused_adam_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "_FUSED_ADAM_DEVICES", frozenset())
    for case in OPTIMIZER_CASES:
        if case.op is ADAM:
            check_meaning(TORCH, case, 1003)
            check_slices(TORCH, case, 1003, [7, 500])


def test_a_plain_step_works_in_place_on_the_callers_memory() -> None:
    buffers = [TORCH.allocate(64, DType.FLOAT32) for _ in range(4)]
    for buffer in buffers:
        buffer.fill(0.5)
    addresses = [buffer.data_ptr() for buffer in buffers]
    TORCH.kernels()[ADAM](buffers[0], buffers[1], buffers[2], buffers[3], None, HYPER, 1.0)
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
    with pytest.raises(ShardingError, match="7 x float32"):
        accelerator.kernels()[ADAM](buffers[0], buffers[1], buffers[2], short, None, HYPER, 1.0)


@pytest.mark.parametrize("accelerator", [TORCH, NUMPY], ids=["torch", "numpy"])
def test_integers_are_not_scaled(accelerator: CpuAccelerator) -> None:
    with pytest.raises(ShardingError, match="cannot scale"):
        accelerator.kernels()[SCALE](accelerator.allocate(3, DType.INT32), 0.5)


def test_a_table_names_who_provides_what() -> None:
    def other(*args: object) -> None:
        raise NotImplementedError

    table = TORCH.kernels().replaced("acme", {ADAM: other})
    assert table[ADAM] is other
    assert (table.provider(ADAM), table.provider(SGD)) == ("acme", "torch")
    assert set(table) == set(ALL_OPS)
    with pytest.raises(PluginContractError, match="no kernel for op 'sgd'"):
        KernelTable("acme", {ADAM: other})[SGD]
