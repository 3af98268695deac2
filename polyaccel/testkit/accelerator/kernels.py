"""The part of the accelerators' contract that is about arithmetic: claimed element types, and every kernel of the
table against its float64 reference."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.ops.base import ALL_OPS, CAST, COMBINE, MATRIX_OPS, SCALE
from polyaccel.testkit.accelerator.memory import BEYOND_A_CHUNK, SMALL_SIZES, contents
from polyaccel.testkit.kernels.cases import kernel_cases
from polyaccel.testkit.kernels.contract import (
    check_matrix_products,
    check_meaning,
    check_quantization,
    check_slices,
    check_square_sums,
    check_stochastic_rounding,
)
from polyaccel.types import DType, ReduceOp


class KernelsContract(ABC):
    """Claimed types compute, and kernels mean what `polyaccel.ops` says. A part of `AcceleratorContract`."""

    @abstractmethod
    def make(self) -> Accelerator: ...

    def test_claimed_types_compute(self) -> None:
        accelerator = self.make()
        table = accelerator.kernels()
        for dtype in accelerator.supported_dtypes() - {DType.BOOL}:
            one, other = accelerator.allocate(33, dtype), accelerator.allocate(33, dtype)
            one.fill(3)
            other.fill(4)
            table[COMBINE](one, other, ReduceOp.SUM)
            np.testing.assert_array_equal(contents(one), np.full(33, 7.0), err_msg=str(dtype))
            if dtype.is_floating:
                table[SCALE](one, 0.5)
                np.testing.assert_array_equal(contents(one), np.full(33, 3.5), err_msg=str(dtype))

    def test_every_op_has_a_kernel(self) -> None:
        table = self.make().kernels()
        missing = sorted(op.name for op in set(ALL_OPS) - set(table))
        assert not missing, f"no kernels for {missing}"
        assert all(table.provider(op) for op in table)

    def test_kernels_write_in_place_where_that_is_claimed(self) -> None:
        accelerator = self.make()
        buffer = accelerator.allocate(64, DType.FLOAT32)
        buffer.fill(2.0)
        address = buffer.data_ptr()
        accelerator.kernels()[SCALE](buffer.view(16, 16), 2.0)
        expected = np.full(64, 2.0)
        if accelerator.capabilities().mutable_buffers:
            expected[16:32] = 4.0
            assert buffer.data_ptr() == address, "a kernel moved a buffer"
            np.testing.assert_array_equal(contents(buffer), expected, err_msg="mutable_buffers is claimed")

    def test_kernels_mean_what_the_reference_says(self) -> None:
        accelerator = self.make()
        seen = set()
        for case in kernel_cases(accelerator.supported_dtypes()):
            for numel in SMALL_SIZES:
                check_meaning(accelerator, case, numel)
            check_meaning(accelerator, case, 61, finite=False, offset=3)
            check_meaning(accelerator, case, 1000, finite=False)
            if case.kernel not in seen:  # once a kernel: what is done by chunks does not depend on the form
                check_meaning(accelerator, case, BEYOND_A_CHUNK, offset=1)
                seen.add(case.kernel)

    def test_kernels_do_not_depend_on_slices(self) -> None:
        accelerator = self.make()
        for case in kernel_cases(accelerator.supported_dtypes()):
            check_slices(accelerator, case, 1003, [7, 32, 96, 555])

    def test_stochastic_rounding_is_the_reference_s(self) -> None:
        accelerator = self.make()
        for case in kernel_cases(accelerator.supported_dtypes()):
            check_stochastic_rounding(accelerator, case, 1003, [7, 32, 555])
            if case.op is CAST:
                check_stochastic_rounding(accelerator, case, BEYOND_A_CHUNK)

    def test_square_sums_are_exact_and_see_overflow(self) -> None:
        accelerator = self.make()
        for dtype in accelerator.supported_dtypes():
            if dtype.is_floating:
                for numel in (*SMALL_SIZES, BEYOND_A_CHUNK):
                    check_square_sums(accelerator, dtype, numel)

    def test_quantisation_means_what_the_reference_says(self) -> None:
        accelerator = self.make()
        for dtype in accelerator.supported_dtypes() - {DType.FLOAT64}:
            if dtype.is_floating:
                for bits in (8, 4):
                    for numel, block_numel in ((0, 2), (1, 2), (37, 8), (5003, 64), (5003, 3000)):
                        check_quantization(accelerator, dtype, numel, block_numel, bits)

    def test_matrix_products_mean_what_the_reference_says(self) -> None:
        accelerator = self.make()
        assert not set(accelerator.matrix_kernels("off"))
        table = accelerator.matrix_kernels("on")
        assert set(table) <= set(MATRIX_OPS)
        for rows, inputs, outputs in ((1, 1, 1), (3, 17, 5), (64, 33, 130), (257, 300, 65)):
            check_matrix_products(accelerator, table, rows, inputs, outputs)
