"""The contract suites catch what they are for: one lie or mistake a plugin, and the test that has to notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest

from polyaccel.accelerators.base import Accelerator, Capabilities, MemoryStats, NullEvent, NullStream, Stream
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.buffer import Buffer
from polyaccel.checkpoint.storage import FileStorage, Storage
from polyaccel.engine.metrics import JsonlMonitor, Monitor, StepMetrics
from polyaccel.errors import CheckpointError
from polyaccel.launch.base import Launcher, LaunchPlan
from polyaccel.launch.local import LocalLauncher
from polyaccel.offload.host import HostTier
from polyaccel.offload.tier import Tier, TierOptions
from polyaccel.ops.base import SCALE, SQUARE_SUMS, KernelTable
from polyaccel.testkit.accelerator import AcceleratorContract
from polyaccel.testkit.contract import list_tests, run_test
from polyaccel.testkit.launcher import LauncherContract
from polyaccel.testkit.monitor import MonitorContract
from polyaccel.testkit.storage import StorageContract
from polyaccel.testkit.tier import TierContract
from polyaccel.types import DeviceId, DType


def claims(name: str, **claimed: Any) -> type[Accelerator]:
    """The CPU with other capabilities."""

    def capabilities(self: CpuAccelerator) -> Capabilities:
        return dataclasses.replace(CpuAccelerator.capabilities(self), **claimed)

    return type(name, (CpuAccelerator,), {"capabilities": capabilities})


ClaimsStreams = claims("ClaimsStreams", streams=True)
ClaimsPinning = claims("ClaimsPinning", host_pinning=True)
ClaimsAnotherComm = claims("ClaimsAnotherComm", default_comm="pigeon")
ClaimsNoFloat32 = claims("ClaimsNoFloat32", dtypes=frozenset({DType.BFLOAT16}))


class ClaimsWhatItLacks(CpuAccelerator):
    """Has no float16."""

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        return super().allocate(numel, DType.FLOAT32 if dtype is DType.FLOAT16 else dtype)


class CopiesInsteadOfWriting(CpuAccelerator):
    def kernels(self) -> KernelTable:
        return super().kernels().replaced(self.name, {SCALE: lambda buffer, factor: buffer.mark_written()})


class LosesNan(CpuAccelerator):
    def __init__(self) -> None:
        super().__init__("numpy", native=False)

    def kernels(self) -> KernelTable:
        def scale(buffer: Buffer, factor: float) -> None:
            np.nan_to_num(buffer.raw, copy=False, posinf=np.inf, neginf=-np.inf)
            buffer.raw[:] = buffer.raw * buffer.raw.dtype.type(factor)
            buffer.mark_written()

        return super().kernels().replaced(self.name, {SCALE: scale})


class NeedsAlignment(CpuAccelerator):
    """A scaling kernel that leaves out what comes before the first vector boundary."""

    def kernels(self) -> KernelTable:
        whole = super().kernels()[SCALE]

        def scale(buffer: Buffer, factor: float) -> None:
            skipped = min(buffer.numel, -(buffer.data_ptr() // buffer.dtype.itemsize) % 8)
            whole(buffer.view(skipped, buffer.numel - skipped), factor)

        return super().kernels().replaced(self.name, {SCALE: scale})


class MissesOverflow(CpuAccelerator):
    def __init__(self) -> None:
        super().__init__("numpy")

    def kernels(self) -> KernelTable:
        whole = super().kernels()[SQUARE_SUMS]

        def square_sums(out: Buffer, pieces: Iterable[tuple[int, Buffer]]) -> None:
            whole(out, pieces)
            np.nan_to_num(out.raw, copy=False)

        return super().kernels().replaced(self.name, {SQUARE_SUMS: square_sums})


class LacksAKernel(CpuAccelerator):
    def kernels(self) -> KernelTable:
        table = super().kernels()
        return KernelTable(self.name, {op: table[op] for op in table if op is not SCALE})


class NeverFrees(CpuAccelerator):
    kept: list[Buffer] = []  # noqa: RUF012 - that is the mistake

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        self.kept.append(super().allocate(numel, dtype))
        return self.kept[-1]


class ForgetsThePeak(CpuAccelerator):
    def memory_stats(self) -> MemoryStats:
        stats = super().memory_stats()
        return dataclasses.replace(stats, peak_nbytes=stats.allocated_nbytes)


class LeavesRubbish(CpuAccelerator):
    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        buffer = super().allocate(numel, dtype)
        buffer.fill(1)
        return buffer


class KeepsItsState(CpuAccelerator):
    def set_rng_state(self, state: bytes) -> None:
        return None


class TakesAnyDevice(CpuAccelerator):
    """Says that it has two devices, and never changes."""

    def device_count(self) -> int:
        return 2

    def current_device(self) -> DeviceId:
        return DeviceId("cpu", 0)


class SecondsEvent(NullEvent):
    def elapsed_ms(self, later: Any) -> float:
        return super().elapsed_ms(later) / 1e3


class CountsSeconds(CpuAccelerator):
    def current_stream(self) -> Stream:
        class SecondsStream(NullStream):
            def record(self) -> SecondsEvent:
                event = super().record()
                assert isinstance(event, NullEvent)
                return SecondsEvent(event.at_s)

        return SecondsStream()


ACCELERATORS = {
    ClaimsStreams: "test_streams_overlap_where_that_is_claimed",
    ClaimsPinning: "test_pinned_copies_are_part_of_their_stream",
    ClaimsAnotherComm: "test_capabilities_are_stated",
    ClaimsNoFloat32: "test_capabilities_are_stated",
    ClaimsWhatItLacks: "test_allocations_are_zero_and_aligned",
    CopiesInsteadOfWriting: "test_kernels_write_in_place_where_that_is_claimed",
    LosesNan: "test_kernels_mean_what_the_reference_says",
    NeedsAlignment: "test_kernels_mean_what_the_reference_says",
    MissesOverflow: "test_square_sums_are_exact_and_see_overflow",
    LacksAKernel: "test_every_op_has_a_kernel",
    NeverFrees: "test_memory_is_counted",
    ForgetsThePeak: "test_memory_is_counted",
    LeavesRubbish: "test_allocations_are_zero_and_aligned",
    KeepsItsState: "test_random_state_is_saved_and_restored",
    TakesAnyDevice: "test_each_device_can_be_chosen",
    CountsSeconds: "test_events_measure_time",
}


@pytest.mark.parametrize("kind", ACCELERATORS, ids=lambda kind: kind.__name__)
def test_an_accelerator_that_lies_is_caught(kind: Callable[[], Accelerator]) -> None:
    class Suite(AcceleratorContract):
        def make(self) -> Accelerator:
            return kind()

    test = ACCELERATORS[kind]  # type: ignore[index]
    outcome = run_test(test, getattr(Suite(), test))
    NeverFrees.kept.clear()
    assert outcome.state == "failed", outcome
    assert outcome.reason


class WritesInPlace(FileStorage):
    """Not atomic: readers see what was written so far."""

    def write(self, path: str, chunks: Iterable[bytes]) -> None:
        target = Path(self.location, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb", buffering=0) as file:
            for chunk in chunks:
                file.write(chunk)


class ReadsShort(FileStorage):
    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        try:
            return super().read(path, offset, nbytes)
        except CheckpointError:
            return b""


class ForgetsChanges(HostTier):
    def lend(self, groups: Any) -> Any:
        for lent in super().lend(groups):
            copies = []
            for buffer in lent:
                copies.append(self.compute.allocate(buffer.numel, buffer.dtype))
                copies[-1].copy_from(buffer)
            yield copies


class SwallowsCodes(LocalLauncher):
    def run(self, plan: LaunchPlan) -> int:
        return min(super().run(plan), 1)


class TakesEveryOption(JsonlMonitor):
    def open(self, directory: Path, options: Any) -> None:
        super().open(directory, {})


class ChokesOnNan(JsonlMonitor):
    def write(self, metrics: StepMetrics) -> None:
        assert metrics.loss == metrics.loss
        super().write(metrics)


def _storage(kind: type[Storage], folder: Path) -> Any:
    return type("Suite", (StorageContract,), {"make": lambda self: kind(folder)})()


def _tier(kind: type[Tier], folder: Path) -> Any:
    def make(self: object) -> Tier:
        tier, host = kind(), CpuAccelerator("numpy")
        tier.open(host, host, TierOptions(path=str(folder)))
        return tier

    return type("Suite", (TierContract,), {"make": make})()


def _launcher(kind: type[Launcher], folder: Path) -> Any:
    return type("Suite", (LauncherContract,), {"make": lambda self: kind()})()


def _monitor(kind: type[Monitor], folder: Path) -> Any:
    return type("Suite", (MonitorContract,), {"make": lambda self: kind()})()


@pytest.mark.parametrize(
    ("suite", "kind", "test"),
    [
        (_storage, WritesInPlace, "test_a_file_appears_whole"),
        (_storage, WritesInPlace, "test_a_failed_write_leaves_the_file_as_it_was"),
        (_storage, WritesInPlace, "test_paths_stay_inside"),
        (_storage, ReadsShort, "test_what_is_not_there_is_an_error"),
        (_tier, ForgetsChanges, "test_lends_in_order_what_kernels_reach_and_keeps_the_changes"),
        (_launcher, SwallowsCodes, "test_the_code_of_the_first_failing_rank_is_the_jobs"),
        (_monitor, TakesEveryOption, "test_unknown_options_are_refused"),
        (_monitor, ChokesOnNan, "test_steps_of_every_kind_are_written"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_plugin_of_another_kind_that_breaks_a_promise_is_caught(
    suite: Callable[[Any, Path], Any], kind: Any, test: str, tmp_path: Path
) -> None:
    place = tmp_path / "deep" / "enough" / "place"
    outcome = run_test(test, getattr(suite(kind, place), test))
    assert outcome.state == "failed", outcome


def test_outcomes_say_what_happened_on_one_line() -> None:
    def compare() -> None:
        np.testing.assert_array_equal([1, 2], [1, 3], err_msg="the second")

    def skip() -> None:
        raise SkipTest("does not claim it")

    assert run_test("a", compare).reason == "the second"
    assert (run_test("b", skip).state, run_test("b", skip).reason) == ("skipped", "does not claim it")
    wrong = run_test("c", lambda: 1 // 0)
    assert wrong.reason.startswith("ZeroDivisionError: ")
    assert "1 // 0" in wrong.traceback
    assert run_test("d", lambda: None).state == "ok"

    def bare() -> None:
        raise AssertionError

    assert run_test("e", bare).reason == "raise AssertionError"
    assert list_tests(StorageContract)[0] == "test_probes"
