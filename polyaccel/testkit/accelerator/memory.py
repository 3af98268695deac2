"""The part of the accelerators' contract that is about devices and their memory: buffers, copies, statistics."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from unittest import SkipTest

import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.buffer import Buffer
from polyaccel.errors import PluginContractError
from polyaccel.ops.reference import Float64s, to_float64
from polyaccel.testkit.contract import refused
from polyaccel.testkit.kernels.contract import encode
from polyaccel.types import DType

ALIGNMENT_NBYTES = 64
SMALL_SIZES = (0, 1, 5, 31, 64, 1000)
BEYOND_A_CHUNK = (1 << 18) + 37
_MIB = 1 << 20


class MemoryContract(ABC):
    """Devices, buffers and their statistics. A part of `AcceleratorContract`."""

    @abstractmethod
    def make(self) -> Accelerator: ...

    def test_devices_are_counted_and_named(self) -> None:
        accelerator = self.make()
        assert accelerator.device_count() >= 1
        accelerator.set_device(0)
        device = accelerator.current_device()
        called = accelerator.torch_device_type or accelerator.name
        assert device.type == called
        assert device.index in (None, 0)
        assert accelerator.device_name(0) == f"{called}:0"

    def test_each_device_can_be_chosen(self) -> None:
        accelerator = self.make()
        count = accelerator.device_count()
        if accelerator.current_device().index is None:
            raise SkipTest("devices without an index are one")
        before = accelerator.current_device().index or 0
        try:
            buffers = []
            for index in range(count):
                accelerator.set_device(index)
                assert accelerator.current_device().index == index, f"device {index} was chosen"
                buffers.append(accelerator.allocate(5, DType.FLOAT32))
                assert buffers[-1].device == accelerator.current_device(), f"a buffer of device {index}"
                buffers[-1].fill(index + 1)
                accelerator.synchronize()
            for buffer in buffers[1:]:
                buffers[0].copy_from(buffer)
            expected = np.full(5, float(count))
            np.testing.assert_array_equal(contents(buffers[0]), expected, err_msg="a copy between devices")
            refused(lambda: accelerator.set_device(count), f"device {count} of {count}")
            refused(lambda: accelerator.set_device(-1), "device -1")
        finally:
            accelerator.set_device(before)

    def test_allocations_are_zero_and_aligned(self) -> None:
        accelerator = self.make()
        for dtype in sorted(accelerator.supported_dtypes(), key=lambda dtype: dtype.value):
            for numel in (*SMALL_SIZES, BEYOND_A_CHUNK):
                for pinned in (False, True):
                    buffer = accelerator.allocate(numel, dtype, pinned=pinned)
                    assert (buffer.numel, buffer.dtype) == (numel, dtype)
                    assert not numel or buffer.data_ptr() % ALIGNMENT_NBYTES == 0, f"{buffer} is not aligned"
                    assert not any(buffer.to_bytes()), f"{buffer} is not zero"

    def test_memory_that_was_used_before_is_zero_again(self) -> None:
        accelerator = self.make()
        for pinned in (False, True):
            for _ in range(4):
                buffer = accelerator.allocate(BEYOND_A_CHUNK, DType.FLOAT32, pinned=pinned)
                assert not any(buffer.to_bytes()), f"{pinned=}"
                buffer.fill(3.0)

    def test_views_share_memory_and_generation(self) -> None:
        buffer = self.make().allocate(64, DType.FLOAT32)
        view = buffer.view(16, 32)
        inner = view.view(8, 4)
        before = buffer.generation
        inner.fill(2.5)
        assert buffer.generation == view.generation == inner.generation > before
        expected = np.zeros(64)
        expected[24:28] = 2.5
        np.testing.assert_array_equal(contents(buffer), expected)
        assert inner.data_ptr() == buffer.data_ptr() + 24 * 4
        for offset, numel in ((-1, 4), (60, 5), (65, 0), (0, -1)):
            refused(lambda o=offset, n=numel: buffer.view(o, n), f"view({offset}, {numel})")  # type: ignore[misc]

    def test_bytes_go_in_and_out(self) -> None:
        accelerator = self.make()
        for dtype in accelerator.supported_dtypes() - {DType.BOOL}:
            buffer = accelerator.allocate(37, dtype)
            data = encode(np.arange(37.0), dtype)
            before = buffer.generation
            buffer.view(5, 32).from_bytes(data[5 * dtype.itemsize :])
            assert buffer.generation > before
            assert buffer.to_bytes() == bytes(5 * dtype.itemsize) + data[5 * dtype.itemsize :], dtype
            refused(lambda b=buffer, d=data: b.from_bytes(d[:-1]), "from_bytes of too few bytes")  # type: ignore[misc]

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
            np.testing.assert_array_equal(contents(target), [1, 1 + 2 * unit, 1 + unit, 1, np.nan])
            source.copy_from(target)
            np.testing.assert_array_equal(contents(source), contents(target))
        refused(lambda: source.copy_from(accelerator.allocate(4, DType.FLOAT32)), "a copy of another length")

    def test_pinned_memory_copies_both_ways(self) -> None:
        accelerator = self.make()
        host, device = accelerator.allocate(100, DType.FLOAT32, pinned=True), accelerator.allocate(100, DType.FLOAT32)
        host.fill(3.0)
        device.copy_from(host)
        device.view(0, 50).fill(4.0)
        host.copy_from(device)
        accelerator.synchronize()
        np.testing.assert_array_equal(contents(host), [4.0] * 50 + [3.0] * 50)

    def test_pinned_copies_are_part_of_their_stream(self) -> None:
        """Copies that do not block the host, as torch starts them, are over when the stream is."""
        accelerator = self.make()
        if not accelerator.capabilities().host_pinning:
            raise SkipTest("does not claim host_pinning")
        numel = 1 << 20
        host, device = (
            accelerator.allocate(numel, DType.FLOAT32, pinned=True),
            accelerator.allocate(numel, DType.FLOAT32),
        )
        if not hasattr(host.raw, "is_pinned"):
            raise SkipTest("only torch's arrays copy without blocking by themselves")
        assert host.raw.is_pinned(), "host_pinning is claimed, but allocate(pinned=True) gives ordinary memory"
        stream = accelerator.current_stream()
        for value in (5.0, 6.0):
            host.fill(value)
            device.raw.copy_(host.raw, non_blocking=True)
            stream.record().synchronize()
            host.fill(0.0)
            host.raw.copy_(device.raw, non_blocking=True)
            stream.record().synchronize()
            np.testing.assert_array_equal(contents(host), np.full(numel, value), err_msg="a copy is late")

    def test_arrays_are_wrapped_or_refused(self) -> None:
        accelerator = self.make()
        refused(lambda: accelerator.wrap(object()), "wrap of an object")
        buffer = accelerator.allocate(6, DType.FLOAT32)
        buffer.fill(2.0)
        try:
            wrapped = accelerator.wrap(buffer.raw)
        except PluginContractError:
            raise SkipTest("wraps no arrays") from None
        assert (wrapped.numel, wrapped.dtype, wrapped.data_ptr()) == (6, DType.FLOAT32, buffer.data_ptr())
        wrapped.fill(7.0)
        np.testing.assert_array_equal(contents(buffer), np.full(6, 7.0), err_msg="a copy was wrapped")

    def test_host_memory_is_worked_on_or_refused(self) -> None:
        accelerator = self.make()
        room = np.zeros(4 * 6, dtype=np.uint8)
        try:
            buffer = accelerator.over_host_memory(room, DType.FLOAT32)
        except PluginContractError:
            raise SkipTest("does not work on host memory") from None
        buffer.fill(3.0)
        np.testing.assert_array_equal(room.view(np.float32), np.full(6, 3.0, dtype=np.float32))

    def test_memory_is_counted(self) -> None:
        accelerator = self.make()
        gc.collect()
        accelerator.reset_peak_memory()
        before = accelerator.memory_stats()
        held = accelerator.allocate(64 * _MIB, DType.UINT8)
        held.fill(1)
        accelerator.synchronize()
        during = accelerator.memory_stats()
        assert during.allocated_nbytes - before.allocated_nbytes >= 32 * _MIB, "64 MiB hardly show"
        assert during.peak_nbytes >= during.allocated_nbytes, "the peak is below what is allocated"
        assert 0 < during.free_nbytes <= during.total_nbytes, "more is free than there is"
        assert during.reserved_nbytes >= during.allocated_nbytes, "less is reserved than allocated"
        assert held.to_bytes()[-1] == 1
        del held
        gc.collect()
        accelerator.synchronize()
        after = accelerator.memory_stats()
        assert during.allocated_nbytes - after.allocated_nbytes >= 32 * _MIB, "64 MiB were freed and hardly show"
        assert after.peak_nbytes >= during.peak_nbytes - 16 * _MIB, "the peak is forgotten"
        accelerator.reset_peak_memory()
        # Equal where somebody counts bytes; a process's resident memory moves by itself.
        assert accelerator.memory_stats().peak_nbytes <= during.peak_nbytes - 32 * _MIB, "the peak was not reset"


def contents(buffer: Buffer) -> Float64s:
    return to_float64(buffer.to_bytes(), buffer.dtype)
