"""The Triton kernels in Triton's interpreter, which runs them on the host: they keep the contract, and their bits are
those of the host's own kernels. `make test-triton`; that a GPU runs them is the matter of tests/device."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1 before Triton is imported: make test-triton", allow_module_level=True)

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.types import DType
from polyaccel.errors import ShardingError
from polyaccel.ops.base import DEQUANTIZE, QUANTIZE, SQUARE_SUMS, UPDATE, KernelTable
from polyaccel.ops.native import native
from polyaccel.ops.optimizers import OPTIMIZERS
from polyaccel.ops.recorded import RECORDED_UPDATE
from polyaccel.ops.reference import to_float64
from polyaccel.ops.triton import torch_table
from polyaccel.ops.triton.torch_table import triton_kernels, why_not
from polyaccel.testkit.accelerator.kernels import KernelsContract
from polyaccel.testkit.kernels.cases import KernelCase, kernel_cases
from polyaccel.testkit.kernels.contract import encode

# Overflow and NaN are ordinary values in kernels; the interpreter computes with numpy, which warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HOST = CpuAccelerator("torch")
FUSED = [
    case
    for case in kernel_cases(frozenset(DType))
    if case.name.split()[0] not in ("combine", "scale") and DType.FLOAT64 not in {a.dtype for a in case.arguments}
]
ADAMW = OPTIMIZERS["AdamW"].rule({"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, 3)


class InterpretedAccelerator(CpuAccelerator):
    """The host with Triton's kernels in place of its own."""

    def __init__(self) -> None:
        super().__init__("torch", native=False)
        self._table = triton_kernels(super().kernels(), "cpu")

    def kernels(self) -> KernelTable:
        return self._table


TRITON = InterpretedAccelerator()


class TestInterpreted(KernelsContract):
    def make(self) -> Accelerator:
        return TRITON


def test_the_table_says_who_computes() -> None:
    assert why_not("cpu") is None
    table = TRITON.kernels()
    assert table.provider(UPDATE).startswith("triton ")
    assert sum(table.provider(op).startswith("triton ") for op in table) == 6


@pytest.mark.skipif(native().library is None, reason=native().reason)
@np.errstate(all="ignore")
@pytest.mark.parametrize("case", FUSED, ids=str)
def test_bits_are_those_of_the_host(case: KernelCase) -> None:
    numel = 1100  # more than one program
    draw = np.random.default_rng(7)
    contents = []
    for argument in case.arguments:
        values = np.abs(draw.standard_normal(numel)) if argument.role == "magnitude" else draw.standard_normal(numel)
        contents.append(encode(values * 2.0 ** draw.integers(-30, 12, numel), argument.dtype))
    after = []
    for accelerator in (TRITON, HOST):
        buffers = [accelerator.allocate(numel, argument.dtype) for argument in case.arguments]
        for buffer, data in zip(buffers, contents, strict=True):
            buffer.from_bytes(data)
        case.call(accelerator.kernels(), buffers)
        after.append([b.to_bytes() for b, a in zip(buffers, case.arguments, strict=True) if a.role != "grad"])
    assert after[0] == after[1]


GROUP = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9}


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad", "Adamax", "Lion"])
def test_numbers_in_memory_give_the_bits_of_numbers_in_the_launch(name: str, step: int) -> None:
    numel, factor, found = 1100, 0.3, []
    rule = OPTIMIZERS[name].rule({**GROUP, "decoupled": name == "AdamW"}, step)
    draw = np.random.default_rng(5)
    contents = [draw.standard_normal(numel) for _ in range(2)]
    contents += [np.abs(draw.standard_normal(numel)) for _ in rule.formula.states]
    types = [DType.FLOAT32, DType.BFLOAT16, *[DType.FLOAT32] * len(rule.formula.states)]
    for is_recorded in (False, True):
        buffers = [TRITON.allocate(numel, dtype) for dtype in types]
        for buffer, values, dtype in zip(buffers, contents, types, strict=True):
            buffer.from_bytes(encode(values, dtype))
        (master, grad, *states), out = buffers, TRITON.allocate(numel, DType.BFLOAT16)
        if is_recorded:
            values = (*rule.constants, factor)
            numbers = TRITON.allocate(len(values), DType.FLOAT64)
            numbers.from_bytes(np.array(values).tobytes())
            fixed = tuple(value if value in (0.0, 1.0) else None for value in rule.constants)
            TRITON.kernels()[RECORDED_UPDATE](rule.formula, fixed, numbers, master, grad, states, out)
        else:
            TRITON.kernels()[UPDATE](rule, master, grad, states, out, factor)
        found.append([buffer.to_bytes() for buffer in (master, *states, out)])
    assert found[0] == found[1]


def test_a_bucket_is_updated_by_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    real = torch_table._launch
    monkeypatch.setattr(torch_table, "_launch", lambda *args, **named: (launches.append(args[1]), real(*args, **named)))
    numel = 5000
    master, grad, *states = (TRITON.allocate(numel, DType.FLOAT32) for _ in range(4))
    TRITON.kernels()[UPDATE](ADAMW, master, grad, states, TRITON.allocate(numel, DType.BFLOAT16), 0.5)
    assert launches == [5]


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_blocks_are_those_of_the_host(bits: int) -> None:
    for numel, block_numel in ((1, 2), (1000, 64), (1001, 100), (40_000, 20_000)):
        values = np.random.default_rng(numel).standard_normal(numel)
        values[0] = np.nan
        found = []
        for accelerator in (TRITON, HOST):
            source = accelerator.allocate(numel, DType.FLOAT32)
            source.from_bytes(encode(values, DType.FLOAT32))
            codes = accelerator.allocate(*((numel, DType.INT8) if bits == 8 else (-(-numel // 2), DType.UINT8)))
            scales, back = accelerator.allocate(-(-numel // block_numel), DType.FLOAT32), source.view(0, numel)
            table = accelerator.kernels()
            table[QUANTIZE](source, codes, scales, block_numel)
            table[DEQUANTIZE](back, codes, scales, block_numel)
            # Not the bits of NaN, which say nothing.
            found.append((codes.to_bytes(), to_float64(scales.to_bytes(), DType.FLOAT32)))
        assert found[0][0] == found[1][0]
        np.testing.assert_array_equal(found[0][1], found[1][1])


def test_a_sum_depends_on_its_piece_only() -> None:
    values = TRITON.allocate(10_000, DType.FLOAT32)
    values.from_bytes(encode(np.random.default_rng(3).standard_normal(10_000), DType.FLOAT32))
    alone, together = TRITON.allocate(1, DType.FLOAT64), TRITON.allocate(3, DType.FLOAT64)
    kernel = TRITON.kernels()[SQUARE_SUMS]
    kernel(alone, [(0, values.view(17, 9000))])
    kernel(together, [(0, values), (1, values.view(17, 9000)), (2, values.view(0, 0))])
    sums = np.frombuffer(together.to_bytes())
    assert sums[1] == np.frombuffer(alone.to_bytes())[0]
    assert sums[2] == 0
    with pytest.raises(ShardingError) as caught:
        kernel(together, [(3, values)])
    assert caught.value.value == 3


def test_buffers_of_other_sizes_are_refused() -> None:
    a, b = TRITON.allocate(8, DType.FLOAT32), TRITON.allocate(9, DType.FLOAT32)
    with pytest.raises(ShardingError):
        TRITON.kernels()[UPDATE](ADAMW, a, b, [a, a])


def test_a_device_that_triton_does_not_compile_for_keeps_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    fallback = KernelTable("torch", {})
    assert triton_kernels(fallback, "cuda:99") is fallback
    assert "no Triton kernels" in caplog.text
