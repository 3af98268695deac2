"""The contract of accelerators as tests: subclass `AcceleratorContract`, say how to make yours, and pytest runs it.

    class TestMyDevice(AcceleratorContract):
        def make(self) -> Accelerator:
            return MyAccelerator()

Every promise of `polyaccel.accelerators.base` that can be tried on one device is tried for real; the kernel table is
held against the float64 reference, and claimed element types are computed with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from polyaccel.accelerators.base import API_VERSION, Accelerator, Probe
from polyaccel.buffer import Buffer
from polyaccel.errors import PolyaccelError
from polyaccel.ops.base import ALL_OPS, CAST, COMBINE, MATRIX_OPS, SCALE
from polyaccel.ops.reference import to_float64
from polyaccel.testkit.kernel_cases import kernel_cases
from polyaccel.testkit.kernels import (
    check_matrix_products,
    check_meaning,
    check_quantization,
    check_slices,
    check_square_sums,
    check_stochastic_rounding,
    encode,
)
from polyaccel.types import DType, ReduceOp

_ALIGNMENT_NBYTES = 64
_SMALL_SIZES = (0, 1, 5, 31, 64, 1000)
_BEYOND_A_CHUNK = (1 << 18) + 37


class AcceleratorContract(ABC):
    """What every accelerator has to do. Its methods are tests; a subclass only says how to make the accelerator."""

    @abstractmethod
    def make(self) -> Accelerator: ...

    def test_states_its_version_and_probes(self) -> None:
        accelerator = self.make()
        assert accelerator.API_VERSION[0] == API_VERSION[0]
        probe = type(accelerator).probe()
        assert isinstance(probe, Probe)
        assert probe.reason, "a probe gives its reason, whatever the answer"

    def test_devices_are_counted_and_named(self) -> None:
        accelerator = self.make()
        assert accelerator.device_count() >= 1
        accelerator.set_device(0)
        device = accelerator.current_device()
        assert device.type == accelerator.name
        assert device.index in (None, 0)

    def test_allocations_are_zero_and_aligned(self) -> None:
        accelerator = self.make()
        for dtype in sorted(accelerator.supported_dtypes(), key=lambda dtype: dtype.value):
            for numel in (*_SMALL_SIZES, _BEYOND_A_CHUNK):
                for pinned in (False, True):
                    buffer = accelerator.allocate(numel, dtype, pinned=pinned)
                    assert (buffer.numel, buffer.dtype) == (numel, dtype)
                    assert not numel or buffer.data_ptr() % _ALIGNMENT_NBYTES == 0, buffer
                    assert not any(buffer.to_bytes()), buffer

    def test_views_share_memory_and_generation(self) -> None:
        buffer = self.make().allocate(64, DType.FLOAT32)
        view = buffer.view(16, 32)
        inner = view.view(8, 4)
        before = buffer.generation
        inner.fill(2.5)
        assert buffer.generation == view.generation == inner.generation > before
        expected = np.zeros(64)
        expected[24:28] = 2.5
        np.testing.assert_array_equal(_contents(buffer), expected)
        for offset, numel in ((-1, 4), (60, 5), (65, 0), (0, -1)):
            _refused(lambda o=offset, n=numel: buffer.view(o, n), f"view({offset}, {numel})")  # type: ignore[misc]

    def test_bytes_go_in_and_out(self) -> None:
        accelerator = self.make()
        for dtype in accelerator.supported_dtypes() - {DType.BOOL}:
            buffer = accelerator.allocate(37, dtype)
            data = encode(np.arange(37.0), dtype)
            before = buffer.generation
            buffer.view(5, 32).from_bytes(data[5 * dtype.itemsize :])
            assert buffer.generation > before
            assert buffer.to_bytes() == bytes(5 * dtype.itemsize) + data[5 * dtype.itemsize :], dtype
            _refused(lambda b=buffer, d=data: b.from_bytes(d[:-1]), "from_bytes of too few bytes")  # type: ignore[misc]

    def test_copies_convert_to_nearest_even(self) -> None:
        accelerator = self.make()
        source = accelerator.allocate(5, DType.FLOAT32)
        for dtype, unit in ((DType.BFLOAT16, 2.0**-7), (DType.FLOAT16, 2.0**-10)):
            if dtype not in accelerator.supported_dtypes():
                continue
            # A tie below an even and below an odd neighbour, and values just beside a tie.
            values = np.array([1 + unit / 2, 1 + unit * 3 / 2, 1 + unit * 0.51, 1 + unit * 0.49, np.nan])
            source.from_bytes(encode(values, DType.FLOAT32))
            target = accelerator.allocate(5, dtype)
            before = target.generation
            target.copy_from(source)
            assert target.generation > before
            np.testing.assert_array_equal(_contents(target), [1, 1 + 2 * unit, 1 + unit, 1, np.nan])
            source.copy_from(target)
            np.testing.assert_array_equal(_contents(source), _contents(target))
        _refused(lambda: source.copy_from(accelerator.allocate(4, DType.FLOAT32)), "a copy of another length")

    def test_pinned_memory_copies_both_ways(self) -> None:
        accelerator = self.make()
        host, device = accelerator.allocate(100, DType.FLOAT32, pinned=True), accelerator.allocate(100, DType.FLOAT32)
        host.fill(3.0)
        device.copy_from(host)
        device.view(0, 50).fill(4.0)
        host.copy_from(device)
        accelerator.synchronize()
        np.testing.assert_array_equal(_contents(host), [4.0] * 50 + [3.0] * 50)

    def test_claimed_types_compute(self) -> None:
        accelerator = self.make()
        table = accelerator.kernels()
        for dtype in accelerator.supported_dtypes() - {DType.BOOL}:
            one, other = accelerator.allocate(33, dtype), accelerator.allocate(33, dtype)
            one.fill(3)
            other.fill(4)
            table[COMBINE](one, other, ReduceOp.SUM)
            np.testing.assert_array_equal(_contents(one), np.full(33, 7.0), err_msg=str(dtype))
            if dtype.is_floating:
                table[SCALE](one, 0.5)
                np.testing.assert_array_equal(_contents(one), np.full(33, 3.5), err_msg=str(dtype))

    def test_random_state_is_saved_and_restored(self) -> None:
        accelerator = self.make()
        original = accelerator.rng_state()
        try:
            accelerator.manual_seed(7)
            seven = accelerator.rng_state()
            accelerator.manual_seed(8)
            assert accelerator.rng_state() != seven
            accelerator.set_rng_state(seven)
            assert accelerator.rng_state() == seven
            accelerator.manual_seed(7)
            assert accelerator.rng_state() == seven
            _refused(lambda: accelerator.set_rng_state(b"no state"), "a random state that is none")
        finally:
            accelerator.set_rng_state(original)

    def test_memory_is_counted(self) -> None:
        accelerator = self.make()
        accelerator.reset_peak_memory()
        before = accelerator.memory_stats()
        held = accelerator.allocate(64 << 20, DType.UINT8)
        held.fill(1)
        accelerator.synchronize()
        during = accelerator.memory_stats()
        assert during.allocated_nbytes - before.allocated_nbytes >= 32 << 20, "64 MiB hardly show"
        assert during.peak_nbytes >= during.allocated_nbytes
        assert 0 < during.free_nbytes <= during.total_nbytes
        assert during.reserved_nbytes >= during.allocated_nbytes
        assert held.to_bytes()[-1] == 1

    def test_streams_keep_their_order(self) -> None:
        accelerator = self.make()
        present, other = accelerator.current_stream(), accelerator.new_stream()
        source, target = accelerator.allocate(1 << 20, DType.FLOAT32), accelerator.allocate(1 << 20, DType.FLOAT32)
        other.wait(present.record())  # the zeros are written on the present stream
        start = other.record()
        with other.use():
            for value in range(1, 9):
                source.fill(value)
        filled = other.record()
        present.wait(filled)
        target.copy_from(source)
        copied = present.record()
        copied.synchronize()
        assert filled.is_reached()
        assert copied.is_reached()
        assert start.elapsed_ms(filled) >= 0
        np.testing.assert_array_equal(_contents(target), np.full(1 << 20, 8.0))
        other.synchronize()
        accelerator.synchronize()

    def test_wrap_refuses_what_it_does_not_know(self) -> None:
        accelerator = self.make()
        _refused(lambda: accelerator.wrap(object()), "wrap of an object")

    def test_every_op_has_a_kernel(self) -> None:
        table = self.make().kernels()
        assert set(ALL_OPS) <= set(table)
        assert all(table.provider(op) for op in table)

    def test_kernels_mean_what_the_reference_says(self) -> None:
        accelerator = self.make()
        ops_seen = set()
        for case in kernel_cases(accelerator.supported_dtypes()):
            for numel in _SMALL_SIZES:
                check_meaning(accelerator, case, numel)
            check_meaning(accelerator, case, 1000, finite=False)
            if case.op not in ops_seen:  # once an op: what is done by chunks does not depend on the form
                check_meaning(accelerator, case, _BEYOND_A_CHUNK)
                ops_seen.add(case.op)

    def test_kernels_do_not_depend_on_slices(self) -> None:
        accelerator = self.make()
        for case in kernel_cases(accelerator.supported_dtypes()):
            check_slices(accelerator, case, 1003, [7, 32, 96, 555])

    def test_stochastic_rounding_is_the_reference_s(self) -> None:
        accelerator = self.make()
        for case in kernel_cases(accelerator.supported_dtypes()):
            check_stochastic_rounding(accelerator, case, 1003, [7, 32, 555])
            if case.op is CAST:
                check_stochastic_rounding(accelerator, case, _BEYOND_A_CHUNK)

    def test_square_sums_are_exact_and_see_overflow(self) -> None:
        accelerator = self.make()
        for dtype in accelerator.supported_dtypes():
            if dtype.is_floating:
                for numel in (*_SMALL_SIZES, _BEYOND_A_CHUNK):
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


def _contents(buffer: Buffer) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return to_float64(buffer.to_bytes(), buffer.dtype)


def _refused(action: Callable[[], object], what: str) -> None:
    """`action` raises an error of ours."""
    try:
        action()
    except PolyaccelError:
        return
    raise AssertionError(f"{what} was accepted")
