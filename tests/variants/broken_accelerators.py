"""Accelerators that are broken in one way each. All else of them is the CPU's."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from variant_table import Broken, named

from polyaccel.accelerators.base import (
    Accelerator,
    Capabilities,
    MemoryStats,
    NullEvent,
    NullStream,
    Probe,
    Stream,
)
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.numpy import NumpyBuffer
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DeviceId, DType
from polyaccel.errors import ShardingError
from polyaccel.ops.base import CAST, QUANTIZE, REDUCE, SCALE, SQUARE_SUMS, UPDATE, KernelTable


class BrokenDevice(Broken, CpuAccelerator):
    """What every broken device is, but for one thing."""

    API_VERSION = (3, 0)
    buffer: Any = None
    """The class of its buffers, where that is what is broken."""

    def __init__(self, native: bool = True) -> None:
        super().__init__("numpy" if self.buffer is not None else None, native=native)

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, "for the table of broken variants", priority=-1)

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        made = super().allocate(numel, dtype, pinned=pinned)
        return made if self.buffer is None else self.buffer(made.raw)


def claims(name: str, **claimed: Any) -> type[Accelerator]:
    """The CPU with other capabilities."""

    def capabilities(self: CpuAccelerator) -> Capabilities:
        return dataclasses.replace(CpuAccelerator.capabilities(self), **claimed)

    return type(name, (BrokenDevice,), {"capabilities": capabilities, "__module__": __name__})


ClaimsStreams = claims("ClaimsStreams", streams=True)
ClaimsPinning = claims("ClaimsPinning", host_pinning=True)
ClaimsAnotherComm = claims("ClaimsAnotherComm", default_comm="pigeon")
ClaimsNoFloat32 = claims("ClaimsNoFloat32", dtypes=frozenset({DType.BFLOAT16}))


class ClaimsWhatItLacks(BrokenDevice):
    """Has no float16."""

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        return super().allocate(numel, DType.FLOAT32 if dtype is DType.FLOAT16 else dtype)


class NamesAnotherDevice(BrokenDevice):
    def device_name(self, index: int | None = None) -> str:
        return f"device {index}"


class TakesAnyDevice(BrokenDevice):
    """Says that it has two devices, and never changes."""

    def device_count(self) -> int:
        return 2

    def current_device(self) -> DeviceId:
        return DeviceId("cpu", 0)


# Kernels.


def with_kernel(name: str, op: Any, make: Any) -> type[Accelerator]:
    """The CPU on numpy with one other kernel, which `make` makes of the right one."""

    def kernels(self: CpuAccelerator) -> KernelTable:
        table = CpuAccelerator.kernels(self)
        return table.replaced(self.name, {op: make(table[op])})

    return type(name, (BrokenDevice,), {"kernels": kernels, "buffer": NumpyBuffer, "__module__": __name__})


def _nothing(right: Any) -> Any:
    return lambda buffer, factor: buffer.bump_version()


def _without_nan(right: Any) -> Any:
    def scale(buffer: Buffer, factor: float) -> None:
        np.nan_to_num(buffer.raw, copy=False, posinf=np.inf, neginf=-np.inf)
        right(buffer, factor)

    return scale


def _from_a_vector_boundary(right: Any) -> Any:
    """Leaves out what comes before the first boundary."""

    def scale(buffer: Buffer, factor: float) -> None:
        skipped = min(buffer.numel, -(buffer.data_ptr() // buffer.dtype.itemsize) % 8)
        right(buffer.view(skipped, buffer.numel - skipped), factor)

    return scale


def _for_buffers_that_begin_alike(right: Any) -> Any:
    """Loads of both buffers are shifted by the target's start."""

    def combine(target: Buffer, source: Buffer, op: Any) -> None:
        apart = (target.data_ptr() - source.data_ptr()) // 4 % 16 if target.numel else 0
        right(target.view(0, target.numel - bool(apart)), source.view(0, target.numel - bool(apart)), op)

    return combine


def _one_too_far(right: Any) -> Any:
    def scale(buffer: Buffer, factor: float) -> None:
        right(buffer, factor)
        base = buffer.raw.base
        if buffer.numel and base is not None:
            whole = np.frombuffer(base, dtype=np.uint8)
            end = buffer.data_ptr() + buffer.nbytes - whole.ctypes.data
            whole[end : end + 1] += 1

    return scale


def _blind(right: Any) -> Any:
    def square_sums(out: Buffer, pieces: Iterable[tuple[int, Buffer]]) -> None:
        right(out, pieces)
        np.nan_to_num(out.raw, copy=False)

    return square_sums


def _a_step_ahead(right: Any) -> Any:
    """Bias corrections of the next step."""

    def update(rule: Any, *args: Any, **more: Any) -> None:
        right(dataclasses.replace(rule, step=rule.step + 1), *args, **more)

    return update


def _unmarked(right: Any) -> Any:
    def scale(buffer: Buffer, factor: float) -> None:
        buffer.raw[:] = buffer.raw * buffer.raw.dtype.type(factor)

    return scale


def _without_a_key(right: Any) -> Any:
    def cast(source: Buffer, out: Buffer, rounding: Any = None) -> None:
        right(source, out, rounding and dataclasses.replace(rounding, key=1))

    return cast


def _by_four(right: Any) -> Any:
    """The last elements, fewer than four, are rounded by another way."""

    def scale(buffer: Buffer, factor: float) -> None:
        right(buffer, factor)
        tail = buffer.numel % 4
        if tail and buffer.dtype is DType.FLOAT32:
            end = buffer.raw[-tail:]
            end[:] = np.nextafter(end, np.float32(np.inf))

    return scale


def _scales_of_another_block(right: Any) -> Any:
    def quantize(source: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        right(source, codes, scales, block_numel)
        if scales.numel > 1:
            scales.raw[:] = np.roll(scales.raw, 1)

    return quantize


CopiesInsteadOfWriting = with_kernel("CopiesInsteadOfWriting", SCALE, _nothing)
LosesNan = with_kernel("LosesNan", SCALE, _without_nan)
NeedsAlignment = with_kernel("NeedsAlignment", SCALE, _from_a_vector_boundary)
NeedsEqualAlignment = with_kernel("NeedsEqualAlignment", REDUCE, _for_buffers_that_begin_alike)
WritesBeside = with_kernel("WritesBeside", SCALE, _one_too_far)
MissesOverflow = with_kernel("MissesOverflow", SQUARE_SUMS, _blind)
WrongAdam = with_kernel("WrongAdam", UPDATE, _a_step_ahead)
ForgetsToMark = with_kernel("ForgetsToMark", SCALE, _unmarked)
RoundsWithoutAKey = with_kernel("RoundsWithoutAKey", CAST, _without_a_key)
RoundsTailsApart = with_kernel("RoundsTailsApart", SCALE, _by_four)
MixesScales = with_kernel("MixesScales", QUANTIZE, _scales_of_another_block)


class LacksAKernel(BrokenDevice):
    def kernels(self) -> KernelTable:
        table = super().kernels()
        return KernelTable(self.name, {op: table[op] for op in table if op is not SCALE})


class Segfaults(BrokenDevice):
    def kernels(self) -> KernelTable:
        def scale(buffer: Buffer, factor: float) -> None:
            ctypes.string_at(0)

        return super().kernels().replaced(self.name, {SCALE: scale})


# Memory.


class NeverFrees(BrokenDevice):
    kept: list[Buffer] = []  # noqa: RUF012 - that is the mistake

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        self.kept.append(super().allocate(numel, dtype))
        return self.kept[-1]


class ForgetsThePeak(BrokenDevice):
    def memory_stats(self) -> MemoryStats:
        stats = super().memory_stats()
        return dataclasses.replace(stats, peak_nbytes=stats.allocated_nbytes)


class LeavesRubbish(BrokenDevice):
    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        buffer = super().allocate(numel, dtype)
        buffer.fill(1)
        return buffer


class AlignsToEight(BrokenDevice):
    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        skipped = 8 // dtype.itemsize
        return super().allocate(numel + skipped, dtype).view(skipped, numel)


class RunsOutByAnotherName(BrokenDevice):
    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        if numel >= 1 << 40:
            raise OSError("cannot map pages")
        return super().allocate(numel, dtype)


class CutsRoundings(NumpyBuffer):
    """Cuts off the low bits of a float32 instead of rounding."""

    def view(self, offset: int, numel: int) -> CutsRoundings:
        return CutsRoundings(super().view(offset, numel).raw, writes=self._writes)

    def copy_from(self, source: Buffer) -> None:
        if self.dtype is DType.FLOAT16 and source.dtype is DType.FLOAT32:
            cut = NumpyBuffer((source.raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32))
            super().copy_from(cut)
        else:
            super().copy_from(source)


class RoundsTowardsZero(BrokenDevice):
    buffer = CutsRoundings


class CopiesViews(NumpyBuffer):
    def view(self, offset: int, numel: int) -> NumpyBuffer:
        return NumpyBuffer(super().view(offset, numel).raw.copy(), writes=self._writes)


class HasStaleViews(BrokenDevice):
    buffer = CopiesViews


class RaisesValueErrors(NumpyBuffer):
    def _check_range(self, offset: int, numel: int) -> None:
        try:
            super()._check_range(offset, numel)
        except ShardingError as error:
            raise ValueError(str(error)) from None


class RaisesAnotherClass(BrokenDevice):
    buffer = RaisesValueErrors


class FillsWords(NumpyBuffer):
    """Fills begin at the eight bytes before."""

    def view(self, offset: int, numel: int) -> FillsWords:
        return FillsWords(super().view(offset, numel).raw, writes=self._writes)

    def fill(self, value: float) -> None:
        super().fill(value)
        early = self.data_ptr() % 8
        if self.numel and early and self.raw.base is not None and self.dtype is DType.FLOAT32:
            whole = np.frombuffer(self.raw.base, dtype=np.uint8)
            start = self.data_ptr() - whole.ctypes.data
            whole[start - early : start] = np.frombuffer(np.float32(value).tobytes(), np.uint8)[:early]


class FillsWholeWords(BrokenDevice):
    buffer = FillsWords


class Wanders(NumpyBuffer):
    """Its memory is another after each fill."""

    def fill(self, value: float) -> None:
        super().fill(value)
        if self.numel > 1000:
            for other in list(MovesMemory.made):
                other._array = other._array.copy()


class MovesMemory(BrokenDevice):
    """Compacts what it has when something large is filled."""

    buffer = Wanders
    made: list[Any] = []  # noqa: RUF012

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        self.made.append(super().allocate(numel, dtype))
        return self.made[-1]


class WrapsACopy(BrokenDevice):
    def wrap(self, array: Any) -> Buffer:
        return super().wrap(array.clone() if hasattr(array, "clone") else array)


class CopiesHostMemory(BrokenDevice):
    def from_host_memory(self, memory: Any, dtype: DType) -> Buffer:
        return super().from_host_memory(memory.copy(), dtype)


# Time. A device that runs its work when somebody waits for it.


class LateBuffer(NumpyBuffer):
    """Fills and copies are queued."""

    device_queue: Any

    def view(self, offset: int, numel: int) -> LateBuffer:
        return self._of(super().view(offset, numel).raw, self._writes)

    @classmethod
    def _of(cls, array: Any, writes: Any = None) -> Any:
        return cls(array, writes=writes)

    def fill(self, value: float) -> None:
        self.device_queue.append(lambda: super(LateBuffer, self).fill(value))
        self.bump_version()

    def copy_from(self, source: Buffer) -> None:
        self.device_queue.append(lambda: super(LateBuffer, self).copy_from(source))

    def to_bytes(self) -> bytes:
        run_all(self.device_queue)
        return super().to_bytes()

    def from_bytes(self, data: bytes | bytearray | memoryview) -> None:
        run_all(self.device_queue)
        super().from_bytes(data)


def run_all(queue: list[Any]) -> None:
    while queue:
        queue.pop(0)()


class ReadsTooEarly(LateBuffer):
    device_queue: Any = []  # noqa: RUF012

    def to_bytes(self) -> bytes:
        return NumpyBuffer.to_bytes(self)


class TakesBytesLater(LateBuffer):
    device_queue: Any = []  # noqa: RUF012

    def from_bytes(self, data: bytes | bytearray | memoryview) -> None:
        self.device_queue.append(lambda: NumpyBuffer.from_bytes(self, data))


class ReadsUnsynchronised(BrokenDevice):
    buffer = ReadsTooEarly


class TakesBytesUnsynchronised(BrokenDevice):
    buffer = TakesBytesLater


class SecondsEvent(NullEvent):
    def elapsed_ms(self, later: Any) -> float:
        return super().elapsed_ms(later) / 1e3


class CountsSeconds(BrokenDevice):
    def current_stream(self) -> Stream:
        class SecondsStream(NullStream):
            def record(self) -> SecondsEvent:
                event = super().record()
                assert isinstance(event, NullEvent)
                return SecondsEvent(event.at_s)

        return SecondsStream()


class NeverReaches(BrokenDevice):
    """Waits for an event that nobody sets."""

    def current_stream(self) -> Stream:
        class Waits(NullStream):
            def synchronize(self) -> None:
                threading.Event().wait()

        return Waits()


# Random states.


class KeepsItsState(BrokenDevice):
    def set_rng_state(self, state: bytes) -> None:
        return None


class TakesAnyState(BrokenDevice):
    def set_rng_state(self, state: bytes) -> None:
        try:
            super().set_rng_state(state)
        except ShardingError:
            return


class LosesTheStateThatItRefuses(BrokenDevice):
    def set_rng_state(self, state: bytes) -> None:
        try:
            super().set_rng_state(state)
        except ShardingError:
            self.manual_seed(0)
            raise


# Loading and probing.


class HangsInItsProbe(BrokenDevice):
    @classmethod
    def probe(cls) -> Probe:
        time.sleep(10_000)
        raise AssertionError


class RaisesInItsProbe(BrokenDevice):
    @classmethod
    def probe(cls) -> Probe:
        raise OSError("no such bus")


class AnswersYes(BrokenDevice):
    @classmethod
    def probe(cls) -> Any:
        return True


class ImportsJax(BrokenDevice):
    @classmethod
    def probe(cls) -> Probe:
        import sys
        import types

        sys.modules["jax"] = types.ModuleType("jax")
        return super().probe()


class DiesInItsProbe(BrokenDevice):
    @classmethod
    def probe(cls) -> Probe:
        os.abort()


class IsAbsent(BrokenDevice):
    @classmethod
    def probe(cls) -> Probe:
        return Probe(False, "no device file /dev/absent0")


class IsForAnotherVersion(BrokenDevice):
    API_VERSION = (9, 0)


class LacksAMethod(Broken, Accelerator):
    API_VERSION = (3, 0)


NAMED = named(globals(), Accelerator)
