"""Broken plugins, one mistake each: the row of `polyaccel plugins check` that has to catch it does, says what was
expected and what came instead, and ends in time.

Here each is tried in this process, on the suite alone. Those that crash, hang, or keep memory (of which other tests in
this process let go meanwhile, so that it would seem that nothing is kept) are tried by name, as the command runs them:
a few of them, and a few of the others. `make test-variants` runs all by name, and prints the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import SkipTest

import broken_accelerators as devices
import broken_comm as comm
import broken_places as places
import pytest
from variant_table import Variant

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.base import Communicator
from polyaccel.offload.tier import TierOptions
from polyaccel.registry import PluginGroup
from polyaccel.testkit import suites
from polyaccel.testkit.accelerator import AcceleratorContract
from polyaccel.testkit.comm import CommContract
from polyaccel.testkit.contract import TIMEOUT_S, CheckOutcome, list_tests, run_test
from polyaccel.testkit.launcher import LauncherContract
from polyaccel.testkit.monitor import MonitorContract
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.testkit.storage import StorageContract
from polyaccel.testkit.tier import TierContract

IS_FULL = os.environ.get("TESTS_VARIANTS") == "full"
HANGING_S = 12.0
"""The limit of rows that hang, of which nothing else is expected."""
GROUPS = {
    PluginGroup.ACCELERATORS: devices.NAMED,
    PluginGroup.COMM: comm.NAMED,
    PluginGroup.STORAGE: places.STORAGES,
    PluginGroup.TIERS: places.TIERS,
    PluginGroup.MONITORS: places.MONITORS,
    PluginGroup.LAUNCHERS: places.LAUNCHERS,
}


def device(kind: Any, row: str, *says: str, own_process: bool = False) -> Variant:
    return Variant(PluginGroup.ACCELERATORS, kind, f"test_{row}", says, own_process)


def backend(kind: Any, row: str, *says: str, own_process: bool = False) -> Variant:
    return Variant(PluginGroup.COMM, kind, f"test_{row}", says, own_process)


def storage(kind: Any, row: str, *says: str, own_process: bool = False) -> Variant:
    return Variant(PluginGroup.STORAGE, kind, f"test_{row}", says, own_process)


def tier(kind: Any, row: str, *says: str, own_process: bool = False) -> Variant:
    return Variant(PluginGroup.TIERS, kind, f"test_{row}", says, own_process)


def monitor(kind: Any, row: str, *says: str) -> Variant:
    return Variant(PluginGroup.MONITORS, kind, f"test_{row}", says)


def launcher(kind: Any, row: str, *says: str) -> Variant:
    return Variant(PluginGroup.LAUNCHERS, kind, f"test_{row}", says)


MEANING = "kernels_mean_what_the_reference_says"
RANDOM = "random_state_is_saved_and_restored"
BACK = "what_was_written_is_read_back"
LATE = "did not answer within"
VARIANTS = (
    device(devices.IsForAnotherVersion, "the_class_loads", "version 9.0", "this polyaccel has 2.", own_process=True),
    device(devices.LacksAMethod, "the_class_loads", "lacks", "allocate", own_process=True),
    device(
        devices.HangsInItsProbe,
        "the_probe_answers",
        "probing it has not ended after 5 s",
        "broken_accelerators.py:",
        own_process=True,
    ),
    device(devices.RaisesInItsProbe, "the_probe_answers", "OSError: no such bus", own_process=True),
    device(devices.AnswersYes, "the_probe_answers", "probe() returned True, not a polyaccel", own_process=True),
    device(devices.DiesInItsProbe, "the_probe_answers", "probing it: ", own_process=True),
    device(devices.ImportsJax, "probing_loads_no_framework", "expected [], got ['jax']", own_process=True),
    device(devices.IsAbsent, "it_can_be_used_here", "no device file /dev/absent0", own_process=True),
    device(devices.ClaimsStreams, "streams_overlap_where_that_is_claimed", "expected one fill to end before", "got it"),
    device(devices.ClaimsPinning, "pinned_copies_are_part_of_their_stream", "expected is_pinned() to be True"),
    device(devices.ClaimsAnotherComm, "capabilities_are_stated", "'pigeon'", "installed: "),
    device(devices.ClaimsNoFloat32, "capabilities_are_stated", "expected float32 among them", "got ['bfloat16']"),
    device(devices.ClaimsWhatItLacks, "allocations_are_zero_and_aligned", "DType.FLOAT16", "got (0, <DType.FLOAT32"),
    device(devices.NamesAnotherDevice, "devices_are_counted_and_named", "expected 'cpu:0', got 'device 0'"),
    device(devices.TakesAnyDevice, "each_device_can_be_chosen", "after set_device(0): expected DeviceId"),
    device(devices.CopiesInsteadOfWriting, "kernels_write_in_place_where_that_is_claimed", "expected 4, got 2"),
    device(devices.LosesNan, MEANING, "expected nan, got 0"),
    device(devices.NeedsAlignment, MEANING, "scale ", "offset=3: expected"),
    device(devices.NeedsEqualAlignment, MEANING, "combine ", "offset=3: expected"),
    device(devices.WritesBeside, MEANING, "what surrounds target", "offset=3: expected"),
    device(devices.WrongAdam, MEANING, "step ", "expected", "got"),
    device(devices.ForgetsToMark, MEANING, "wrote target without bump_version"),
    device(devices.RoundsTailsApart, "kernels_do_not_depend_on_slices", "when cut at [7, 32, 96, 555]", "expected"),
    device(devices.RoundsWithoutAKey, "stochastic_rounding_is_the_reference_s", "rounded stochastically", "expected"),
    device(devices.MixesScales, "quantisation_means_what_the_reference_says", "scales, ", "expected"),
    device(devices.MissesOverflow, "square_sums_are_exact_and_see_overflow", "expected nan, got 0"),
    device(devices.LacksAKernel, "every_op_has_a_kernel", "expected [], got ['scale']"),
    device(devices.Segfaults, "claimed_types_compute", "exit code -11 (SIGSEGV)", "in scale", own_process=True),
    device(devices.NeverFrees, "memory_is_counted", "64 MiB were freed: expected at least", "got", own_process=True),
    device(devices.ForgetsThePeak, "memory_is_counted", "peak_nbytes after", "expected at least"),
    device(devices.LeavesRubbish, "allocations_are_zero_and_aligned", "expected 00 00", "got 80 3f"),
    device(devices.AlignsToEight, "allocations_are_zero_and_aligned", "modulo 64: expected 0, got 8"),
    device(
        devices.RunsOutByAnotherName, "more_memory_than_there_is_is_refused", "expected MemoryError", "got builtins.OSE"
    ),
    device(devices.RoundsTowardsZero, "copies_convert_to_nearest_even", "expected 1.00195312, got 1.00097656"),
    device(devices.HasStaleViews, "views_share_memory_and_generation", "expected 2.5, got 0 at element 24"),
    device(devices.RaisesAnotherClass, "views_share_memory_and_generation", "expected ShardingError, got ValueError"),
    device(devices.FillsWholeWords, "parts_at_odd_places_are_filled_and_copied", "filled from element 5: expected"),
    device(devices.MovesMemory, "memory_stays_where_it_is", "addresses of buffers", "expected ["),
    device(devices.WrapsACopy, "arrays_are_wrapped_or_refused", "wrap(buffer.raw): expected (6"),
    device(devices.CopiesHostMemory, "host_memory_is_worked_on_or_refused", "expected 3, got 0"),
    device(devices.ReadsUnsynchronised, "bytes_are_read_when_the_current_stream_has_written_them", "expected 1, got 0"),
    device(devices.TakesBytesUnsynchronised, "bytes_that_were_given_may_change_at_once", "expected 1, got 0"),
    device(devices.CountsSeconds, "events_measure_time", "elapsed_ms: expected about", "got "),
    device(devices.NeverReaches, "a_stream_keeps_its_order", LATE, "in synchronize", own_process=True),
    device(devices.KeepsItsState, RANDOM, "rng_state() after set_rng_state: expected"),
    device(devices.TakesAnyState, RANDOM, "was accepted: expected ShardingError"),
    device(devices.LosesTheStateThatItRefuses, RANDOM, "bytes that are not a state: expected"),
    backend(comm.SumsAverages, "all_reduce", "all_reduce ReduceOp.AVG", "expected"),
    backend(comm.LosesTheLastElement, "all_reduce", "all_reduce ReduceOp.SUM", "expected"),
    backend(comm.ReturnsBeforeTheEnd, "all_reduce", "all_reduce ReduceOp.SUM", "expected"),
    backend(comm.KeepsTheFirstPart, "reduce_scatter", "reduce_scatter ReduceOp.SUM", "expected"),
    backend(comm.WritesIntoTheSource, "reduce_scatter", "the source of a reduce_scatter", "expected"),
    backend(comm.ForgetsThatPartsOverlap, "all_gather", "in_place=True on rank", "got 0"),
    backend(comm.ShiftsUnevenParts, "uneven_all_gather", "all_gather, uneven: ", "expected"),
    backend(comm.ReadsFromTheStart, "parts_at_odd_places", "from elements 1, 3 and 5", "got 0 at element 0"),
    backend(comm.TakesTheFirstRoot, "broadcast", "broadcast from 1 on rank", "expected"),
    backend(comm.SwapsMessages, "messages", "message 0 on rank", "expected"),
    backend(comm.GathersBackwards, "objects", "all_gather_object of 0 bytes a rank", "expected"),
    backend(comm.AddsTheOtherWayRound, "reductions_agree_bitwise", "DType.FLOAT32 on rank", "expected"),
    backend(comm.RoundsEveryAddition, "reductions_agree_bitwise", "DType.BFLOAT16 on rank", "expected"),
    backend(comm.DoesNotCountWrites, "results_are_marked_written", "broadcast wrote a buffer"),
    backend(comm.TakesAnyGroup, "nonsense_is_refused", "a group with a rank twice was accepted: expected CommError"),
    backend(comm.RaisesPlainErrors, "nonsense_is_refused", "expected ShardingError, got RuntimeError"),
    backend(comm.HearsNothing, "disagreement", "ranks made different calls (0)"),
    backend(comm.NamesNobody, "disagreement", "ranks made different calls (0)"),
    backend(comm.KeepsItsWorks, "nothing_is_left_over", "after 20 rounds of calls rank"),
    backend(comm.StartsAThreadACall, "nothing_is_left_over", "threads and open files were"),
    backend(comm.KeepsCopies, "memory_does_not_grow", "expected less than 4 MiB more", "got", own_process=True),
    backend(comm.NeverCloses, "close", "a call on a closed group was accepted: expected CommError"),
    backend(comm.SegfaultsInASum, "all_reduce", "rank 1 died with exit code -11 (SIGSEGV)", own_process=True),
    backend(comm.NeverMeets, "ranks_meet", LATE, "in connect", own_process=True),
    backend(
        comm.NeverTimesOut, "a_rank_that_does_not_come_is_named", "expected a CommTimeout", "none", own_process=True
    ),
    storage(places.WritesInPlace, "a_file_appears_whole", "expected [b'old', b'old', b'old'], got [b'new'"),
    storage(places.WritesInPlace, "a_failed_write_leaves_the_file_as_it_was", "expected 6f 6c 64, got 6e 65 77"),
    storage(places.WritesInPlace, "paths_stay_inside", "writing to ../secret was accepted: expected CheckpointError"),
    storage(places.ReadsShort, "what_is_not_there_is_an_error", "was accepted: expected CheckpointError, got b''"),
    storage(places.RaisesSystemErrors, "what_is_not_there_is_an_error", "expected CheckpointError, got EOFError"),
    storage(places.LosesALastChunk, "a_file_may_be_large", "expected 5242880, got 4194304"),
    storage(
        places.GathersChunks, "chunks_are_not_gathered_in_memory", "expected that of few chunks, got", own_process=True
    ),
    storage(places.OrphansChunks, "what_was_replaced_or_deleted_takes_no_room", "expected 2097152", ".blobs/"),
    storage(places.KeepsContents, "nothing_is_kept_of_files", "expected less than 8 MiB more", "got", own_process=True),
    storage(places.KeepsFilesOpen, "nothing_is_kept_of_files", "open files after 32", "expected about"),
    storage(places.ListsEverything, "names_are_sorted_and_only_of_one_folder", "expected (('a', 'b')", "'b/c/three'"),
    storage(
        places.DeletesWhatBeginsAlike,
        "a_file_is_deleted",
        "expected (('one.more', 'two'), None, 1), got (('two',), None, 1)",
    ),
    storage(places.DeletesTheFolder, "a_tree_is_deleted", "expected (('three',), None, 1), got ((), None, None)"),
    storage(places.KeepsTheFirst, "a_file_is_replaced", "expected 5, got 13"),
    tier(places.BeginsWithRubbish, "begins_with_zeros", "expected 0, got 1"),
    tier(places.ForgetsChanges, "lends_in_order_what_kernels_reach_and_keeps_the_changes", "expected 10, got 1"),
    tier(
        places.LendsBackwards, "lends_in_order_what_kernels_reach_and_keeps_the_changes", "expected [[3.0, 1.0], [2.0]]"
    ),
    tier(places.DropsAWalkThatEndsEarly, "keeps_what_was_changed_when_a_walk_ends_early", "expected 3, got 0"),
    tier(places.FetchesHalf, "what_is_fetched_arrives", "expected 1500, got 0 at element 1500"),
    tier(places.BelongsToAThread, "threads_use_it_in_turn", "can only be used in that same thread"),
    tier(places.SharesItsKeys, "tiers_of_two_threads_do_not_meet", "of two: expected 3"),
    tier(places.KeepsWhatItLends, "walks_keep_no_memory", "expected less than 8 MiB more", "got", own_process=True),
    tier(places.LendsAfterItWasClosed, "is_refused_after_it_was_closed", "was accepted: expected InvariantError"),
    monitor(places.ChokesOnNan, "steps_of_every_kind_are_written", "metrics.loss == metrics.loss"),
    monitor(places.LosesRows, BACK, "expected [], got [7, 14, 21, 28, 35]"),
    monitor(places.LosesTheLastRows, BACK, "expected [], got [17, 18, 19, 20, 37, 38, 39, 40]"),
    monitor(places.BeginsAnew, BACK, "expected [], got [1, 2, 3"),
    monitor(places.WritesOtherNumbers, BACK, "'accuracy', by step from 1: expected 0.025, got 0.03"),
    monitor(places.ClosesOnce, "closing_is_always_allowed", "RuntimeError: not open"),
    monitor(places.TakesEveryOption, "unknown_options_are_refused", "was accepted: expected ConfigError"),
    launcher(places.SwallowsCodes, "the_code_of_the_first_failing_rank_is_the_jobs", "expected 7, got 1"),
    launcher(places.StartsOneTooFew, "every_rank_runs_with_its_own_environment", "'2': '3'}, got {"),
)
IN_PROCESS = [variant for variant in VARIANTS if not variant.own_process]
BY_NAME = [*[one for one in VARIANTS if one.own_process][2::3], *IN_PROCESS[5::40]]
CAUGHT: list[str] = []
"""Lines of the table, of this session."""


class HonestDevice(AcceleratorContract):
    kind: Callable[[], Accelerator]

    def make(self) -> Accelerator:
        return type(self).kind()


class OwnRanks(CommContract):
    world_sizes = (3,)
    lie: Any = None

    def run(self, world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        def told(communicator: Communicator) -> Any:
            return body(communicator if self.lie is None else comm.told_by(self.lie, communicator), *args)

        return run_threads(world_size, told)


def suite_of(variant: Variant, folder: Path) -> Any:
    """The suite of the variant's contract, in this process."""
    kind, made = variant.kind, {"__module__": __name__}
    if variant.group is PluginGroup.ACCELERATORS:
        return type("Suite", (HonestDevice,), {**made, "kind": kind})()
    if variant.group is PluginGroup.COMM:
        return type("Suite", (OwnRanks,), {**made, "lie": kind})()
    if variant.group is PluginGroup.STORAGE:
        return type("Suite", (StorageContract,), {**made, "make": lambda self: kind(folder)})()
    if variant.group is PluginGroup.LAUNCHERS:
        return type("Suite", (LauncherContract,), {**made, "make": lambda self: kind()})()
    if variant.group is PluginGroup.MONITORS:
        return type("Suite", (MonitorContract,), {**made, "make": lambda self: kind()})()

    def make(self: object) -> Any:
        opened, host = kind(), CpuAccelerator("numpy")
        opened.open(host, host, TierOptions(path=str(folder)))
        return opened

    return type("Suite", (TierContract,), {**made, "make": make})()


def forget() -> None:
    """Let go of what leaking plugins have kept."""
    comm.StartsAThreadACall.ends.set()
    for leaking in (
        devices.MovesMemory.made,
        comm.KeepsItsWorks.kept,
        places.KeepsFilesOpen.files,
    ):
        for one in leaking:
            getattr(one, "close", bool)()
        leaking.clear()
    places.SharesItsKeys.memory.clear()


def holds(variant: Variant, outcome: CheckOutcome) -> None:
    assert outcome.state == "failed", outcome
    said = " ".join(f"{outcome.reason} {outcome.hint}".split())
    assert [piece for piece in variant.says if piece not in said] == [], said


@pytest.mark.skipif(IS_FULL, reason="all of them are run by name")
@pytest.mark.parametrize("variant", IN_PROCESS, ids=str)
def test_a_broken_plugin_is_caught_by_its_row(variant: Variant, tmp_path: Path) -> None:
    comm.StartsAThreadACall.ends.clear()
    suite = suite_of(variant, tmp_path / "deep" / "enough" / "place")
    outcome = run_test(variant.row, getattr(suite, variant.row))
    forget()
    holds(variant, outcome)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All broken plugins, in one package."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "broken_variants-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken_variants\nVersion: 1.0\n")
    lines = []
    for group, kinds in GROUPS.items():
        lines += [f"[{group.value}]", *(f"{name} = {kind.__module__}:{kind.__name__}" for name, kind in kinds.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    here = Path(__file__).parent
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(here), str(here.parent / "support")]))
    yield
    patch.undo()


def rows(variant: Variant) -> Iterator[Any]:
    """The rows of the command for the variant, by its name."""
    name = comm.backend_name(variant.kind) if variant.group is PluginGroup.COMM else variant.kind.name
    device_name = name if variant.group is PluginGroup.ACCELERATORS else "cpu"
    timeout_s = HANGING_S if LATE in variant.says else TIMEOUT_S
    subject = suites.Subject(variant.group, name, device_name, timeout_s=timeout_s)
    yield from suites.loading_rows(subject)
    if variant.group is PluginGroup.COMM:
        yield from suites.rank_rows(subject, name)
    else:
        yield from suites.contract_rows(subject)


@pytest.mark.timeout(200)
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("variant", VARIANTS if IS_FULL else BY_NAME, ids=str)
def test_a_broken_plugin_is_caught_by_name_and_in_time(variant: Variant) -> None:
    begin = perf_counter()
    walk = rows(variant)
    row = next(row for row in walk if row.test == variant.row)
    outcome = row.run()
    walk.close()
    holds(variant, outcome)
    CAUGHT.append(variant.as_row(perf_counter() - begin))


def test_the_table_has_every_broken_plugin() -> None:
    tried = {variant.kind for variant in VARIANTS}
    plain = {"BrokenDevice", "BrokenBackend", "BrokenStorage", "BrokenTier", "BrokenMonitor", "BrokenLauncher"}
    there = {kind for group, kinds in GROUPS.items() if group is not PluginGroup.COMM for kind in kinds.values()}
    there |= set(comm.LIES)
    assert {kind.__name__ for kind in there - tried} - plain == set()
    assert len(tried) >= 49


def test_every_row_says_what_it_wants_and_why() -> None:
    for contract in suites.ALL_CONTRACTS.values():
        for test in list_tests(contract):
            wants = suites.wanted_by(contract, test)
            assert wants.endswith("."), f"{contract.__name__}.{test}: {wants!r}"
            assert len(wants) > 30


def test_outcomes_say_what_happened_in_few_lines() -> None:
    def skip() -> None:
        raise SkipTest("does not claim it")

    assert (run_test("b", skip).state, run_test("b", skip).reason) == ("skipped", "does not claim it")
    wrong = run_test("c", lambda: 1 // 0)
    assert wrong.reason.startswith("ZeroDivisionError: ")
    assert "1 // 0" in wrong.traceback
    assert run_test("d", lambda: None).state == "ok"

    def bare() -> None:
        raise AssertionError

    assert run_test("e", bare).reason == "raise AssertionError"
    assert list_tests(StorageContract)[0] == "test_probes"
