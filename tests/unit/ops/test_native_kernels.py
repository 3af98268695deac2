"""The compiled kernels beyond the contract: numpy's bits on every instruction set, however work is cut and shared out.

That they keep the contract of every accelerator is the matter of test_accelerators_contract.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import InvariantError, ShardingError
from polyaccel.ops.base import (
    ALL_OPS,
    CAST,
    DEQUANTIZE,
    QUANTIZE,
    REDUCE,
    SCALE,
    SQUARE_SUMS,
    UPDATE,
    KernelTable,
)
from polyaccel.ops.native import native, native_kernels
from polyaccel.ops.optimizers import OPTIMIZERS, apply_direction
from polyaccel.testkit.kernels.cases import KernelCase, kernel_cases
from polyaccel.testkit.kernels.contract import check_meaning, check_slices, check_stochastic_rounding, encode

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)

TORCH, NUMPY = CpuAccelerator("torch"), CpuAccelerator("numpy", native=False)
CASES = kernel_cases(frozenset(DType))
ADAMW = OPTIMIZERS["AdamW"].rule({"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, 3)
ISAS = ("avx512", "avx2", "portable", "neon")


def choose(isa: str) -> bool:
    library = native().library
    return library is not None and library.pa_choose_isa(isa.encode()) == 0


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor has."""
    before = native().isa
    if not choose(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    assert native().isa == request.param
    assert choose(before)


class CpuWithThreads(CpuAccelerator):
    """The host with torch memory and `count` threads, whatever torch was told."""

    def __init__(self, count: int) -> None:
        super().__init__("torch")
        self._table = native_kernels(CpuAccelerator("torch", native=False).kernels(), lambda: count)

    def kernels(self) -> KernelTable:
        return self._table


def filled(accelerator: Accelerator, case: KernelCase, numel: int) -> list[Buffer]:
    draw = np.random.default_rng(numel)
    buffers = []
    for argument in case.arguments:
        buffer = accelerator.allocate(numel, argument.dtype)
        buffer.from_bytes(encode(np.abs(draw.standard_normal(numel)) + 0.01, argument.dtype))
        buffers.append(buffer)
    return buffers


def contents_after(accelerator: Accelerator, table: KernelTable, case: KernelCase, numel: int) -> list[bytes]:
    buffers = filled(accelerator, case, numel)
    case.call(table, buffers)
    return [
        buffer.to_bytes()
        for argument, buffer in zip(case.arguments, buffers, strict=True)
        if argument.role not in ("grad", "source", "weights")
    ]


def test_every_op_is_compiled() -> None:
    table = TORCH.kernels()
    assert {table.provider(op) for op in ALL_OPS} == {f"csrc {native().isa}"}


def test_every_instruction_set_gives_numpys_bits(isa: str) -> None:
    table = native_kernels(NUMPY.kernels(), lambda: 1)
    # numpy rounds a factor to the 16-bit type before it multiplies; these do not, nor does torch.
    others = ("scale float16", "scale bfloat16")
    cases = [case for case in kernel_cases(NUMPY.supported_dtypes()) if case.name not in others]
    assert {case.kernel for case in cases} >= {"update adamw", "combine", "update apply"}
    beyond_a_share = (1 << 16) + 1001
    seen = set()
    for case in cases:
        for numel in (1, 1000, 2053) if case.kernel in seen else (1, 1000, 2053, beyond_a_share):
            seen.add(case.kernel)
            ours = contents_after(NUMPY, table, case, numel)
            assert ours == contents_after(NUMPY, NUMPY.kernels(), case, numel), f"{isa}: {case}, {numel=}"


def test_every_instruction_set_means_what_the_reference_says(isa: str) -> None:
    for case in CASES:
        check_meaning(TORCH, case, 1037, finite=False)


def test_every_instruction_set_rounds_stochastically_as_the_reference_says(isa: str) -> None:
    for case in CASES:
        check_stochastic_rounding(TORCH, case, 1037, [1, 16, 700], seed=3)


def test_threads_round_stochastically_without_changing_a_bit() -> None:
    case = next(case for case in CASES if case.kernel == "update adamw" and "bfloat16" in case.name)
    check_stochastic_rounding(CpuWithThreads(3), case, (1 << 17) + 1001, [(1 << 16) + 3])


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_narrow_weights_and_states_are_the_wide_ones_rounded(dtype: DType) -> None:
    cases = [c for c in CASES if {a.dtype for a in c.arguments} == {DType.FLOAT32} and c.op not in (CAST, REDUCE)]
    assert {case.op for case in cases} == set(ALL_OPS) - {CAST, REDUCE, SQUARE_SUMS, QUANTIZE, DEQUANTIZE}
    for case in cases:
        narrow = []
        for buffer in filled(TORCH, case, 777):
            narrow.append(TORCH.allocate(777, dtype))
            narrow[-1].copy_from(buffer)
        wide = [TORCH.wrap(buffer.raw.float()) for buffer in narrow]
        case.call(TORCH.kernels(), narrow)
        case.call(TORCH.kernels(), wide)
        for argument, one, other in zip(case.arguments, narrow, wide, strict=True):
            if argument.role not in ("grad", "source", "weights"):
                assert torch.equal(one.raw, other.raw.to(one.raw.dtype)), f"{case}: {argument.role}"


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_over_bfloat16_alone_is_the_wide_one_rounded(decoupled: bool, isa: str) -> None:
    group = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled": decoupled}
    rule = OPTIMIZERS["Adam"].rule(group, 3)
    draw = np.random.default_rng(7)
    for numel, start, threads in ((1, 0, 1), (2, 1, 1), (31, 1, 1), (1000, 0, 1), ((1 << 17) + 1001, 1, 3)):
        table = CpuWithThreads(threads).kernels()
        # Any bits: subnormals, infinities and NaN are among them. (Which of two NaN stays is the compiler's choice.)
        bits = [draw.integers(0, 1 << width, start + numel, np.uint16) for width in (16, 16, 16, 15)]
        narrow = [TORCH.wrap(torch.from_numpy(some)[start:].view(torch.bfloat16)) for some in bits]
        wide, rounded = [TORCH.allocate(numel, DType.FLOAT32) for _ in bits], TORCH.allocate(numel, DType.BFLOAT16)
        for one, other in zip(narrow, wide, strict=True):
            table[CAST](one, other)
        table[UPDATE](rule, narrow[0], narrow[1], narrow[2:], None, 0.5)
        table[UPDATE](rule, wide[0], wide[1], wide[2:], None, 0.5)
        for one, other in zip(narrow, wide, strict=True):
            table[CAST](other, rounded)
            is_nan = rounded.raw.isnan()
            assert torch.equal(one.raw.isnan(), is_nan), f"{numel=}"
            assert torch.equal(one.raw[~is_nan].view(torch.int16), rounded.raw[~is_nan].view(torch.int16)), f"{numel=}"
            assert numel < 1000 or 0 < is_nan.sum() < numel


@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])
def test_nan_wins_whichever_side_it_is_on(dtype: DType, isa: str) -> None:
    nan, inf = float("nan"), float("inf")
    for op in (ReduceOp.MAX, ReduceOp.MIN):
        target = TORCH.wrap(torch.tensor([nan, 1.0, nan, -inf, 2.0] * 9).to(getattr(torch, dtype.value)))
        source = TORCH.wrap(torch.tensor([1.0, nan, nan, inf, -3.0] * 9).to(target.raw.dtype))
        expected = (torch.maximum if op is ReduceOp.MAX else torch.minimum)(target.raw, source.raw)
        TORCH.kernels()[REDUCE](target, source, op)
        torch.testing.assert_close(target.raw, expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(CASES), st.integers(0, 2500), st.lists(st.floats(0, 1), max_size=4))
def test_an_update_is_bitwise_that_of_its_pieces(case: KernelCase, numel: int, cuts: list[float]) -> None:
    check_slices(TORCH, case, numel, sorted(int(cut * numel) for cut in cuts))


@pytest.mark.parametrize("case", [case for case in CASES if "bfloat16" in case.name], ids=str)
def test_threads_share_out_work_without_changing_a_bit(case: KernelCase) -> None:
    one, three = CpuWithThreads(1), CpuWithThreads(3)
    numel = (1 << 17) + 1001
    assert contents_after(three, three.kernels(), case, numel) == contents_after(one, one.kernels(), case, numel)


@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])
def test_a_sum_of_squares_depends_on_its_piece_only(dtype: DType) -> None:
    numel, sums = 300_007, set()
    values = np.random.default_rng(5).standard_normal(numel)
    before = native().isa
    for isa, shift, threads in ((before, 0, 1), (before, 3, 3), ("avx2", 17, 1), ("portable", 0, 2)):
        if not choose(isa):
            continue
        cpu = CpuWithThreads(threads)
        piece = cpu.allocate(numel + shift, dtype).view(shift, numel)
        piece.from_bytes(encode(values, dtype))
        out = cpu.allocate(2, DType.FLOAT64)
        cpu.kernels()[SQUARE_SUMS](out, [(1, piece)])
        sums.add(out.to_bytes())
    assert choose(before)
    assert len(sums) == 1


@pytest.mark.parametrize("dtype", [DType.INT64, DType.INT32, DType.INT16, DType.INT8, DType.UINT8, DType.FLOAT64])
def test_other_types_are_combined_as_torch_does(dtype: DType, isa: str) -> None:
    plain = CpuAccelerator("torch", native=False)
    draw = np.random.default_rng(9)
    for op in ReduceOp:
        data = [draw.integers(0, 256, 1003 * dtype.itemsize, dtype=np.uint8).tobytes() for _ in range(2)]
        if dtype is DType.FLOAT64:
            data = [draw.standard_normal(1003).tobytes() for _ in range(2)]
        results = []
        for accelerator in (TORCH, plain):
            target, source = accelerator.allocate(1003, dtype), accelerator.allocate(1003, dtype)
            target.from_bytes(data[0])
            source.from_bytes(data[1])
            accelerator.kernels()[REDUCE](target, source, op)
            assert target.version > 1
            results.append(target.to_bytes())
        assert results[0] == results[1], op


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_every_16_bit_number_is_read_and_written_as_torch_does(dtype: DType, isa: str) -> None:
    table = TORCH.kernels()
    every = TORCH.allocate(1 << 16, dtype)
    every.from_bytes(np.arange(1 << 16, dtype=np.uint16).tobytes())
    wide = TORCH.allocate(1 << 16, DType.FLOAT32)
    table[REDUCE](wide, every, ReduceOp.SUM)
    torch.testing.assert_close(wide.raw, every.raw.float(), rtol=0, atol=0, equal_nan=True)

    # Any bits of float32, and all middles between two neighbours.
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    bits[::3] &= np.uint32(0xFFFF8000 if dtype is DType.BFLOAT16 else 0xFFFFF000)
    master, zero = TORCH.wrap(torch.from_numpy(bits.view(np.float32))), TORCH.allocate(1 << 16, DType.FLOAT32)
    table[UPDATE](apply_direction(1.0), master, zero, (), every)
    torch.testing.assert_close(every.raw, master.raw.to(every.raw.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantisation_gives_numpys_bits(bits: int, isa: str) -> None:
    native_table = native_kernels(NUMPY.kernels(), lambda: 2)
    for numel, block_numel in ((1, 2), (5003, 64), (70_001, 3000)):
        source = NUMPY.allocate(numel, DType.FLOAT32)
        source.from_bytes(encode(np.random.default_rng(numel).standard_normal(numel), DType.FLOAT32))
        results = []
        for table in (native_table, NUMPY.kernels()):
            codes = NUMPY.allocate(numel if bits == 8 else (numel + 1) // 2, DType.INT8 if bits == 8 else DType.UINT8)
            scales, back = NUMPY.allocate(-(-numel // block_numel), DType.FLOAT32), NUMPY.allocate(numel, DType.FLOAT32)
            table[QUANTIZE](source, codes, scales, block_numel)
            table[DEQUANTIZE](back, codes, scales, block_numel)
            results.append((codes.to_bytes(), scales.to_bytes(), back.to_bytes()))
        assert results[0] == results[1]


def test_the_smallest_numbers_are_quantised_within_the_codes(isa: str) -> None:
    # The scale is the smallest subnormal, too coarse for the quotient to stay within 127.
    source, back = TORCH.allocate(4, DType.FLOAT32), TORCH.allocate(4, DType.FLOAT32)
    source.from_bytes(np.array([190, 190 | 1 << 31, 3, 0], dtype=np.uint32).tobytes())
    codes, scales = TORCH.allocate(4, DType.INT8), TORCH.allocate(1, DType.FLOAT32)
    TORCH.kernels()[QUANTIZE](source, codes, scales, 4)
    assert codes.raw.tolist() == [127, -127, 3, 0]
    TORCH.kernels()[DEQUANTIZE](back, codes, scales, 4)
    assert back.raw.isfinite().all()


def test_buffers_that_do_not_fit_are_refused() -> None:
    table = TORCH.kernels()
    four = [TORCH.allocate(8, DType.FLOAT32) for _ in range(4)]
    short, codes = TORCH.allocate(7, DType.FLOAT32), TORCH.allocate(8, DType.INT8)
    with pytest.raises(ShardingError) as caught:
        table[UPDATE](ADAMW, four[0], four[1], [four[2], short])
    assert caught.value.value == 7
    assert "float32" in str(caught.value)
    with pytest.raises(ShardingError) as caught:
        table[REDUCE](four[0], short, ReduceOp.SUM)
    assert caught.value.value == 7
    assert "float32" in str(caught.value)
    with pytest.raises(ShardingError) as caught:
        table[SQUARE_SUMS](TORCH.allocate(3, DType.FLOAT64), [(3, short)])
    assert caught.value.value == 3
    with pytest.raises(ShardingError) as caught:
        table[SCALE](TORCH.allocate(3, DType.INT32), 0.5)
    assert caught.value.value == "int32"
    with pytest.raises(ShardingError) as caught:
        table[QUANTIZE](four[0], codes, short, 4)
    assert caught.value.value == 7
    assert "float32" in str(caught.value)
    with pytest.raises(ShardingError) as caught:
        table[QUANTIZE](four[0], TORCH.allocate(4, DType.UINT8), TORCH.allocate(3, DType.FLOAT32), 3)
    assert caught.value.value == 3
    with pytest.raises(InvariantError) as caught:
        native().call("pa_combine", 99, 0, 0, None, None, 1)
    assert caught.value.value == (99, 0, 0, None, None, 1)
