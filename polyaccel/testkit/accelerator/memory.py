"""The part of the accelerators' contract that is about devices and their memory: buffers, copies, statistics."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from threading import Event, Thread
from unittest import SkipTest

import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import PluginContractError, ShardingError
from polyaccel.ops.reference import Float64s, to_float64
from polyaccel.testkit.comparison import equal, refused, same_bytes, same_numbers
from polyaccel.testkit.kernels.contract import encode
from polyaccel.testkit.progress import doing

ALIGNMENT_NBYTES = 64
SMALL_SIZES = (0, 1, 5, 31, 64, 1000)
BEYOND_A_CHUNK = (1 << 18) + 37
_MIB = 1 << 20
_QUEUED = 64
_MORE_THAN_THERE_IS = 1 << 58
_LEAST_SHOWN_NBYTES = 32 * _MIB  # of 64 MiB: resident memory is counted by the batch of pages


class MemoryContract(ABC):
    """Devices, buffers and their statistics. A part of `AcceleratorContract`."""

    @abstractmethod
    def make(self) -> Accelerator: ...

    def test_devices_are_counted_and_named(self) -> None:
        """There is a device, named as torch names it or else by the plugin's own name: modules and errors speak of
        devices by these."""
        accelerator = self.make()
        if accelerator.device_count() < 1:
            raise AssertionError(f"device_count(): expected at least 1, got {accelerator.device_count()}")
        accelerator.set_device(0)
        device = accelerator.current_device()
        called = accelerator.torch_device_type or accelerator.name
        equal(device.type, called, "current_device().type, after torch_device_type or else name")
        if device.index not in (None, 0):
            raise AssertionError(f"current_device().index after set_device(0): expected 0 or None, got {device.index}")
        equal(accelerator.device_name(0), f"{called}:0", "device_name(0)")

    def test_each_device_can_be_chosen(self) -> None:
        """After `set_device` memory is on that device, devices copy to each other, and an index that does not exist is
        a ShardingError: ranks choose theirs so."""
        accelerator = self.make()
        count = accelerator.device_count()
        if accelerator.current_device().index is None:
            raise SkipTest("devices without an index are one")
        before = accelerator.current_device().index or 0
        try:
            buffers = []
            for index in range(count):
                accelerator.set_device(index)
                equal(accelerator.current_device().index, index, f"current_device().index after set_device({index})")
                buffers.append(accelerator.allocate(5, DType.FLOAT32))
                equal(buffers[-1].device, accelerator.current_device(), f"device of a buffer after set_device({index})")
                buffers[-1].fill(index + 1)
                accelerator.synchronize()
            for buffer in buffers[1:]:
                buffers[0].copy_from(buffer)
            same_numbers(contents(buffers[0]), np.full(5, float(count)), "a copy between devices")
            refused(lambda: accelerator.set_device(count), f"device {count} of {count}", ShardingError)
            refused(lambda: accelerator.set_device(-1), "device -1", ShardingError)
        finally:
            accelerator.set_device(before)

    def test_allocations_are_zero_and_aligned(self) -> None:
        """`allocate` gives zeros of the type and length that were asked for, on a 64-byte boundary, pinned or not: the
        plan adds into fresh memory, and other frameworks import nothing less aligned."""
        accelerator = self.make()
        for dtype in sorted(accelerator.supported_dtypes(), key=lambda dtype: dtype.value):
            for numel in (*SMALL_SIZES, BEYOND_A_CHUNK):
                for pinned in (False, True):
                    buffer = accelerator.allocate(numel, dtype, pinned=pinned)
                    what = f"allocate({numel}, {dtype.value}, {pinned=})"
                    equal((buffer.numel, buffer.dtype), (numel, dtype), what)
                    if numel:
                        equal(buffer.data_ptr() % ALIGNMENT_NBYTES, 0, f"{what}: data_ptr() modulo {ALIGNMENT_NBYTES}")
                    same_bytes(buffer.to_bytes(), bytes(buffer.nbytes), f"{what}: contents")

    def test_memory_that_was_used_before_is_zero_again(self) -> None:
        """Memory that was written, freed and allocated again is zero again: an allocator that keeps blocks clears
        them."""
        accelerator = self.make()
        for pinned in (False, True):
            for _ in range(4):
                buffer = accelerator.allocate(BEYOND_A_CHUNK, DType.FLOAT32, pinned=pinned)
                same_numbers(contents(buffer), np.zeros(BEYOND_A_CHUNK), f"memory that was used before, {pinned=}")
                buffer.fill(3.0)

    def test_more_memory_than_there_is_is_refused(self) -> None:
        """Where there is no room `allocate` raises MemoryError or the framework's own error of that, by which scripts
        try a smaller batch, and the device works on."""
        accelerator = self.make()
        try:
            buffer = accelerator.allocate(_MORE_THAN_THERE_IS, DType.FLOAT32)
        except Exception as error:
            if not is_out_of_memory(error):
                kind = f"{type(error).__module__}.{type(error).__qualname__}"
                raise AssertionError(
                    "allocate of 2**60 bytes: expected MemoryError, torch.OutOfMemoryError or XLA's "
                    f"RESOURCE_EXHAUSTED, got {kind}: {error}"
                ) from error
        else:
            raise AssertionError(f"allocate of 2**60 bytes: expected MemoryError, got {buffer!r}")
        small = accelerator.allocate(3, DType.FLOAT32)
        small.fill(2.0)
        same_numbers(contents(small), np.full(3, 2.0), "a small buffer after one that found no room")

    def test_views_share_memory_and_generation(self) -> None:
        """A view is the same memory, and counts writes with what it was cut from; one that leads outside is a
        ShardingError: parameters are views of buckets, and generations show who has changed."""
        buffer = self.make().allocate(64, DType.FLOAT32)
        view = buffer.view(16, 32)
        inner = view.view(8, 4)
        before = buffer.version
        inner.fill(2.5)
        if not buffer.version == view.version == inner.version > before:
            found = (buffer.version, view.version, inner.version)
            raise AssertionError(f"generations after a fill of a view: expected one above {before} thrice, got {found}")
        expected = np.zeros(64)
        expected[24:28] = 2.5
        same_numbers(contents(buffer), expected, "a buffer after a fill of elements 24 to 27 by a view of a view")
        equal(inner.data_ptr(), buffer.data_ptr() + 24 * 4, "data_ptr() of a view of a view at element 24")
        for value in (7.0, 8.0):
            buffer.fill(value)
            same_numbers(contents(inner), np.full(4, value), "a view after a fill of the whole buffer")
        for offset, numel in ((-1, 4), (60, 5), (65, 0), (0, -1)):
            refused(lambda o=offset, n=numel: buffer.view(o, n), f"view({offset}, {numel}) of 64", ShardingError)  # type: ignore[misc]

    def test_memory_stays_where_it_is(self) -> None:
        """A buffer keeps its address and contents whatever is allocated, written and freed after it: parameters,
        registered memory and messages under way point there."""
        accelerator = self.make()
        held = [accelerator.allocate(numel, DType.FLOAT32) for numel in SMALL_SIZES[1:]]
        for value, buffer in enumerate(held):
            buffer.fill(value)
        addresses = [buffer.data_ptr() for buffer in held]
        for numel in (7, 1000, BEYOND_A_CHUNK):
            other = accelerator.allocate(numel, DType.FLOAT32)
            other.fill(9.0)
            accelerator.allocate(numel, DType.FLOAT32).copy_from(other)
        gc.collect()
        accelerator.synchronize()
        equal([buffer.data_ptr() for buffer in held], addresses, "addresses of buffers after others came and went")
        for value, buffer in enumerate(held):
            what = f"contents of {buffer!r} after others came and went"
            same_numbers(contents(buffer), np.full(buffer.numel, float(value)), what)

    def test_bytes_go_in_and_out(self) -> None:
        """`from_bytes` and `to_bytes` keep every bit of every type, and take no other length: checkpoints are made of
        them."""
        accelerator = self.make()
        for dtype in sorted(accelerator.supported_dtypes() - {DType.BOOL}, key=lambda dtype: dtype.value):
            buffer = accelerator.allocate(37, dtype)
            data = encode(np.arange(37.0), dtype)
            before = buffer.version
            buffer.view(5, 32).from_bytes(data[5 * dtype.itemsize :])
            if buffer.version <= before:
                raise AssertionError(f"generation after from_bytes: expected more than {before}, got the same")
            expected = bytes(5 * dtype.itemsize) + data[5 * dtype.itemsize :]
            same_bytes(buffer.to_bytes(), expected, f"37 x {dtype.value}, the last 32 by from_bytes of a view")
            refused(lambda b=buffer, d=data: b.from_bytes(d[:-1]), "from_bytes of too few bytes", ShardingError)  # type: ignore[misc]

    def test_parts_at_odd_places_are_filled_and_copied(self) -> None:
        """Fills and copies of views that begin at odd elements, each at another, reach what they should and nothing
        around it: where a slice begins is the plan's business, not the device's."""
        accelerator = self.make()
        for dtype in sorted(accelerator.supported_dtypes() - {DType.BOOL}, key=lambda dtype: dtype.value):
            doing(f"views of {dtype.value}")
            for numel in (1, 31, 1000):
                source, target = accelerator.allocate(numel + 9, dtype), accelerator.allocate(numel + 9, dtype)
                values = np.arange(numel + 9.0) % 100 + 1
                source.from_bytes(encode(values, dtype))
                target.view(3, numel).copy_from(source.view(1, numel))
                expected = np.zeros(numel + 9)
                expected[3 : 3 + numel] = values[1 : 1 + numel]
                same_numbers(contents(target), expected, f"{numel} x {dtype.value} copied from element 1 to element 3")
                target.view(5, numel).fill(7)
                expected[5 : 5 + numel] = 7
                same_numbers(contents(target), expected, f"{numel} x {dtype.value} filled from element 5")

    def test_copies_convert_to_nearest_even(self) -> None:
        """A copy to another type rounds to the nearest number, a tie to the even one, and keeps NaN: 16-bit parameters
        are made so from master weights."""
        accelerator = self.make()
        source = accelerator.allocate(5, DType.FLOAT32)
        for dtype, unit in ((DType.BFLOAT16, 2.0**-7), (DType.FLOAT16, 2.0**-10)):
            if dtype not in accelerator.supported_dtypes():
                continue
            # A tie below an even and below an odd neighbour, and values just above and below a tie.
            values = np.array([1 + unit / 2, 1 + unit * 3 / 2, 1 + unit * 0.51, 1 + unit * 0.49, np.nan])
            source.from_bytes(encode(values, DType.FLOAT32))
            target = accelerator.allocate(5, dtype)
            before = target.version
            target.copy_from(source)
            if target.version <= before:
                raise AssertionError(f"generation after copy_from: expected more than {before}, got the same")
            rounded = [1, 1 + 2 * unit, 1 + unit, 1, np.nan]
            same_numbers(contents(target), rounded, f"ties and their neighbours, copied from float32 to {dtype.value}")
            source.copy_from(target)
            same_numbers(contents(source), contents(target), f"a copy from {dtype.value} to float32")
        other = accelerator.allocate(4, DType.FLOAT32)
        refused(lambda: source.copy_from(other), "a copy of 4 elements to 5", ShardingError)

    def test_pinned_memory_copies_both_ways(self) -> None:
        """Memory of `allocate(pinned=True)` and the device's copy to each other; it is ordinary host memory where
        `host_pinning` is not claimed: offloaded states take this road."""
        accelerator = self.make()
        host, device = accelerator.allocate(100, DType.FLOAT32, pinned=True), accelerator.allocate(100, DType.FLOAT32)
        host.fill(3.0)
        device.copy_from(host)
        device.view(0, 50).fill(4.0)
        host.copy_from(device)
        accelerator.synchronize()
        same_numbers(contents(host), [4.0] * 50 + [3.0] * 50, "100 numbers, to the device and back")
        claims = accelerator.capabilities().host_pinning
        if not claims and getattr(host.raw, "is_pinned", bool)():
            raise AssertionError("host_pinning=False, allocate(pinned=True): expected plain memory, got pinned memory")

    def test_pinned_copies_are_part_of_their_stream(self) -> None:
        """Copies that do not block the host, as torch starts them, are over when the stream is, where `host_pinning` is
        claimed."""
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
        if not host.raw.is_pinned():
            raise AssertionError(
                "host_pinning is claimed, but allocate(pinned=True) gives ordinary memory: expected is_pinned() to be "
                "True, got False"
            )
        stream = accelerator.current_stream()
        for value in (5.0, 6.0):
            host.fill(value)
            device.raw.copy_(host.raw, non_blocking=True)
            stream.record().synchronize()
            host.fill(0.0)
            host.raw.copy_(device.raw, non_blocking=True)
            stream.record().synchronize()
            same_numbers(contents(host), np.full(numel, value), "copies to the device and back, after their events")

    def test_a_resize_of_memory_lets_other_threads_run(self) -> None:
        """A resize of a torch tensor's memory does not hold the interpreter's lock while it waits for the device: what
        ends there, a collective or a copy, may release tensors, which takes that lock. Parameters are freed so."""
        accelerator = self.make()
        freed = accelerator.allocate(BEYOND_A_CHUNK, DType.FLOAT32).raw
        if not hasattr(freed, "untyped_storage") or not freed.untyped_storage().resizable():
            raise SkipTest("its memory cannot be resized")
        begins = Event()
        other = Thread(target=begins.wait, daemon=True)
        other.start()
        for _ in range(_QUEUED):
            accelerator.allocate(BEYOND_A_CHUNK, DType.FLOAT32).fill(1.0)  # the device has the last reference
        begins.set()
        doing("a resize")
        freed.untyped_storage().resize_(0)
        other.join()
        equal(freed.untyped_storage().nbytes(), 0, "bytes of memory that was freed")

    def test_arrays_are_wrapped_or_refused(self) -> None:
        """`wrap` gives the memory of an array itself and no copy, and refuses other types by a PluginContractError:
        gradients come in by it."""
        accelerator = self.make()
        refused(lambda: accelerator.wrap(object()), "wrap of an object", PluginContractError)
        buffer = accelerator.allocate(6, DType.FLOAT32)
        buffer.fill(2.0)
        try:
            wrapped = accelerator.wrap(buffer.raw)
        except PluginContractError:
            if accelerator.torch_device_type is None:
                raise SkipTest("wraps no arrays") from None
            raise
        found = (wrapped.numel, wrapped.dtype, wrapped.data_ptr())
        equal(found, (6, DType.FLOAT32, buffer.data_ptr()), "length, type and address of wrap(buffer.raw)")
        wrapped.fill(7.0)
        same_numbers(contents(buffer), np.full(6, 7.0), "a buffer after a fill of wrap(buffer.raw)")

    def test_host_memory_is_worked_on_or_refused(self) -> None:
        """`from_host_memory` writes into the array that it was given, or refuses it by a PluginContractError: ranks
        share memory by it."""
        accelerator = self.make()
        room = np.zeros(4 * 6, dtype=np.uint8)
        try:
            buffer = accelerator.from_host_memory(room, DType.FLOAT32)
        except PluginContractError:
            raise SkipTest("does not work on host memory") from None
        buffer.fill(3.0)
        same_numbers(room.view(np.float32), np.full(6, 3.0), "an array after a fill of the buffer over it")

    def test_memory_is_counted(self) -> None:
        """`memory_stats` shows what is allocated, forgets what was freed, and remembers the peak until it is reset:
        logs and plans are compared with it, and memory that is never given back shows here."""
        accelerator = self.make()
        gc.collect()
        accelerator.reset_peak_memory()
        before = accelerator.memory_stats()
        if not before.total_nbytes:
            raise SkipTest("gives no numbers on memory: they are 0")
        held = accelerator.allocate(64 * _MIB, DType.UINT8)
        held.fill(1)
        accelerator.synchronize()
        during = accelerator.memory_stats()
        _at_least(during.allocated_nbytes - before.allocated_nbytes, _LEAST_SHOWN_NBYTES, "bytes that 64 MiB added")
        _at_least(during.peak_nbytes, during.allocated_nbytes, "peak_nbytes, against allocated_nbytes")
        _at_least(during.free_nbytes, 1, "free_nbytes")
        _at_least(during.total_nbytes, during.free_nbytes, "total_nbytes, against free_nbytes")
        _at_least(during.reserved_nbytes, during.allocated_nbytes, "reserved_nbytes, against allocated_nbytes")
        equal(held.to_bytes()[-1], 1, "the last byte of 64 MiB that were filled with 1")
        del held
        gc.collect()
        accelerator.synchronize()
        after = accelerator.memory_stats()
        freed = during.allocated_nbytes - after.allocated_nbytes
        _at_least(freed, _LEAST_SHOWN_NBYTES, "bytes fewer once 64 MiB were freed")
        _at_least(after.peak_nbytes, during.peak_nbytes - 16 * _MIB, "peak_nbytes after 64 MiB were freed")
        accelerator.reset_peak_memory()
        # Equal where bytes are counted; a process's resident memory moves by itself.
        lower = during.peak_nbytes - accelerator.memory_stats().peak_nbytes
        _at_least(lower, _LEAST_SHOWN_NBYTES, "bytes by which reset_peak_memory lowers the peak")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that there is no room: MemoryError, torch's, or XLA's."""
    is_named = any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__)
    return isinstance(error, MemoryError) or is_named or "RESOURCE_EXHAUSTED" in str(error)


def _at_least(found: int, expected: int, what: str) -> None:
    if found < expected:
        raise AssertionError(f"{what}: expected at least {expected}, got {found}")


def contents(buffer: Buffer) -> Float64s:
    return to_float64(buffer.to_bytes(), buffer.dtype)
