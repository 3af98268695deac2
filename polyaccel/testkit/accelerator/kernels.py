"""The arithmetic part of the accelerators' contract: claimed element types, and every kernel against float64."""

from __future__ import annotations

from abc import ABC, abstractmethod
from unittest import SkipTest

import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.types import DType, ReduceOp
from polyaccel.ops.base import ALL_OPS, CAST, DEQUANTIZE, GROUPED_OPS, MATRIX_OPS, QUANTIZE, REDUCE, SCALE
from polyaccel.testkit.accelerator.memory import BEYOND_A_CHUNK, SMALL_SIZES, contents
from polyaccel.testkit.comparison import equal, same_numbers
from polyaccel.testkit.kernels.cases import kernel_cases
from polyaccel.testkit.kernels.contract import (
    check_matrix_products,
    check_meaning,
    check_quantization,
    check_slices,
    check_square_sums,
    check_stochastic_rounding,
)
from polyaccel.testkit.kernels.grouped import check_grouped_products


class KernelsContract(ABC):
    """Tests of claimed element types and of the kernel table. A part of `AcceleratorContract`."""

    @abstractmethod
    def make(self) -> Accelerator:
        """Return a new accelerator."""

    def test_claimed_types_compute(self) -> None:
        """Every element type that `dtypes` claims adds, and floating ones scale: the engine takes any of them at its
        word."""
        accelerator = self.make()
        table = accelerator.kernels()
        for dtype in accelerator.supported_dtypes() - {DType.BOOL}:
            one, other = accelerator.allocate(33, dtype), accelerator.allocate(33, dtype)
            one.fill(3)
            other.fill(4)
            table[REDUCE](one, other, ReduceOp.SUM)
            same_numbers(contents(one), np.full(33, 7.0), f"3 + 4 in {dtype.value}")
            if dtype.is_floating:
                table[SCALE](one, 0.5)
                same_numbers(contents(one), np.full(33, 3.5), f"7 * 0.5 in {dtype.value}")

    def test_every_op_has_a_kernel(self) -> None:
        """Each op has a kernel that names its provider: an engine that misses one in a step cannot continue."""
        accelerator = self.make()
        table = accelerator.kernels()
        needed = set(ALL_OPS) - (set() if accelerator.capabilities().mutable_buffers else {QUANTIZE, DEQUANTIZE})
        missing = sorted(op.name for op in needed - set(table))
        equal(missing, [], "ops without a kernel")
        equal([op.name for op in table if not table.provider(op)], [], "kernels whose provider has no name")

    def test_kernels_write_in_place_where_that_is_claimed(self) -> None:
        """A kernel on a view changes the memory that the buffer has, and nothing around it: parameters are views of
        buckets."""
        accelerator = self.make()
        buffer = accelerator.allocate(64, DType.FLOAT32)
        buffer.fill(2.0)
        address = buffer.data_ptr()
        accelerator.kernels()[SCALE](buffer.view(16, 16), 2.0)
        expected = np.full(64, 2.0)
        if accelerator.capabilities().mutable_buffers:
            expected[16:32] = 4.0
            equal(buffer.data_ptr(), address, "address of a buffer after a kernel on a view of it")
            same_numbers(contents(buffer), expected, "a buffer of which elements 16 to 31 were doubled in place")

    def test_kernels_mean_what_the_reference_says(self) -> None:
        """Each kernel computes what float64 does, on every size, with NaN and infinities, and on buffers that begin at
        odd places unlike each other, because slices of parameters do."""
        accelerator = self.make()
        each_compiles = not accelerator.capabilities().mutable_buffers
        seen = set()
        for case in kernel_cases(accelerator.supported_dtypes()):
            is_first = case.kernel not in seen
            seen.add(case.kernel)
            check_meaning(accelerator, case, 61, finite=False, offset=3)
            if each_compiles and not is_first:  # each length is its own program, and a second to compile it
                continue
            check_meaning(accelerator, case, 1000, finite=False)
            for numel in SMALL_SIZES:
                check_meaning(accelerator, case, numel)
            if is_first:  # once a kernel: what is done by chunks does not depend on the form
                check_meaning(accelerator, case, BEYOND_A_CHUNK, offset=1)

    def test_kernels_do_not_depend_on_slices(self) -> None:
        """The bits of an element do not depend on where its slice begins or ends: stages cut parameters differently
        and must agree."""
        accelerator = self.make()
        if not accelerator.capabilities().mutable_buffers:
            raise SkipTest("where arrays never change each length is its own program, whose bits are not guaranteed")
        for case in kernel_cases(accelerator.supported_dtypes()):
            check_slices(accelerator, case, 1003, [7, 32, 96, 555])

    def test_stochastic_rounding_is_the_reference_s(self) -> None:
        """Stochastic rounding gives the reference's bits, whose choices depend on key and index alone, so that a
        restart repeats them."""
        accelerator = self.make()
        each_compiles = not accelerator.capabilities().mutable_buffers
        seen = set()
        for case in kernel_cases(accelerator.supported_dtypes()):
            is_first = case.kernel not in seen
            seen.add(case.kernel)
            check_stochastic_rounding(accelerator, case, 1003, () if each_compiles and not is_first else (7, 32, 555))
            if case.op is CAST:
                check_stochastic_rounding(accelerator, case, BEYOND_A_CHUNK)

    def test_square_sums_are_exact_and_see_overflow(self) -> None:
        """Sums of squares are float64's and pass NaN and infinities on: clipping and the search for overflow stand on
        them."""
        accelerator = self.make()
        for dtype in accelerator.supported_dtypes():
            if dtype.is_floating:
                for numel in (*SMALL_SIZES, BEYOND_A_CHUNK):
                    check_square_sums(accelerator, dtype, numel)

    def test_quantisation_means_what_the_reference_says(self) -> None:
        """Codes and scales are the reference's and have its meaning, because other ranks read them."""
        accelerator = self.make()
        if QUANTIZE not in accelerator.kernels():
            raise SkipTest("quantises nothing, as a device whose arrays never change may")
        for dtype in accelerator.supported_dtypes() - {DType.FLOAT64}:
            if dtype.is_floating:
                for bits in (8, 4):
                    for numel, block_numel in ((0, 2), (1, 2), (37, 8), (5003, 64), (5003, 3000)):
                        check_quantization(accelerator, dtype, numel, block_numel, bits)

    def test_matrix_products_mean_what_the_reference_says(self) -> None:
        """Matrix products, where the device has its own, are as exact as rounding allows, and "off" gives none: a user
        chose that."""
        accelerator = self.make()
        equal([op.name for op in accelerator.matrix_kernels("off")], [], 'kernels of matrix_kernels("off")')
        table = accelerator.matrix_kernels("on")
        known = {*MATRIX_OPS, *GROUPED_OPS}
        equal(sorted(op.name for op in set(table) - known), [], "ops of matrix_kernels that are not products")
        grouped = [op.name for op in GROUPED_OPS if op in table]
        equal(grouped, [op.name for op in GROUPED_OPS] if grouped else [], "grouped products, all or none")
        if not set(table):
            raise SkipTest("leaves matrix products to the framework")
        for rows, inputs, outputs in ((1, 1, 1), (3, 17, 5), (64, 33, 130), (257, 300, 65)):
            check_matrix_products(accelerator, table, rows, inputs, outputs)
        if grouped:
            for counts, inputs, outputs in (((1,), 1, 1), ((0, 3, 0, 17), 5, 33), ((64, 1, 130), 70, 65)):
                check_grouped_products(accelerator, table, counts, inputs, outputs)
