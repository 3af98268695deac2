"""The nvme tier on the disk: overlap, room, damage, and whose files are whose."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyaccel.accelerators.base import Capabilities
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import OffloadError
from polyaccel.offload.folder import remove_stale
from polyaccel.offload.nvme import NvmeTier
from polyaccel.offload.state_file import StateFile
from polyaccel.offload.tier import TierOptions
from polyaccel.offload.transfers import Transfer, Transfers
from polyaccel.ops.native import Native, native

F32 = DType.FLOAT32
HOST = CpuAccelerator("numpy")
NUMEL = 1500  # not a whole number of blocks


def open_tier(path: Path, **options: Any) -> NvmeTier:
    tier = NvmeTier()
    tier.open(HOST, HOST, TierOptions(**{"path": str(path), **options}))
    return tier


@pytest.fixture(autouse=True, params=["csrc", "python"])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with the threads of csrc/ and with Python's."""
    if request.param == "python":
        monkeypatch.setattr("polyaccel.offload.transfers.native", lambda: Native(None, "not wanted"))
    elif native().library is None:
        pytest.skip(native().reason)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NvmeTier]:
    tier = open_tier(tmp_path)
    yield tier
    tier.close()


def values(buffer: Buffer) -> set[float]:
    array = HOST.allocate(buffer.numel, F32)
    array.copy_from(buffer)
    return set(array.raw.tolist())


def three_groups(tier: NvmeTier) -> list[list[Buffer]]:
    return [[tier.allocate(f"{name}{index}", NUMEL, F32) for name in "ab"] for index in range(3)]


@pytest.mark.parametrize(("numel", "piece_numel"), [(NUMEL, 10**8), (NUMEL, 100), (NUMEL, 7), (0, 7)])
def test_a_device_that_is_not_the_host_gets_contents_in_pieces(tmp_path: Path, numel: int, piece_numel: int) -> None:
    class Far(CpuAccelerator):
        """Notes how many elements host memory has that it copies from."""

        def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
            if pinned:
                rooms.append(numel)
            return super().allocate(numel, dtype)

        def capabilities(self) -> Capabilities:
            return replace(super().capabilities(), host_pinning=True)

    rooms: list[int] = []
    device = Far("numpy")
    tier = NvmeTier()
    options = TierOptions(path=str(tmp_path), piece_numel=piece_numel, buffer_count=3)
    tier.open(device, HOST, options)
    source, target = tier.allocate("a", numel, F32), device.allocate(numel, F32)
    source.from_bytes(np.arange(numel, dtype=np.float32).tobytes())
    for _ in range(2):
        target.fill(-1.0)
        tier.fetch(source, target).finish()
        assert target.raw.tolist() == list(range(numel))
    assert len(rooms) <= min(3, -(-numel // piece_numel))  # for good
    assert all(0 < room <= max(piece_numel, numel + 1023) for room in rooms)
    tier.close()


def file_of(buffer: Buffer) -> Path:
    return buffer.file.path  # type: ignore[attr-defined, no-any-return]


# Overlap.


class Noted(Transfer):
    def __init__(self, real: Transfer, name: str, waited: list[str]) -> None:
        self._real, self._name, self._waited = real, name, waited

    @property
    def is_done(self) -> bool:
        return False  # a slow disk

    def wait(self) -> OSError | None:
        self._waited.append(self._name)
        return self._real.wait()


class SlowDisk(Transfers):
    """Takes the place of a tier's transfers, and notes what was asked for and what was waited for."""

    def __init__(self, tier: NvmeTier) -> None:
        self._real = tier._transfers
        self.started: list[str] = []
        self.waited: list[str] = []
        tier._transfers = self

    def start(self, path: Path, offset: int, memory: Buffer, *, writes: bool) -> Transfer:
        self.started.append(f"{'write' if writes else 'read'} {path.name}")
        return Noted(self._real.start(path, offset, memory, writes=writes), self.started[-1], self.waited)

    def close(self) -> None:
        self._real.close()


def test_the_next_group_is_read_while_one_is_in_use(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, pipeline_read=True)
    groups, disk = three_groups(tier), SlowDisk(tier)
    walk = tier.stream_groups(groups)
    next(walk)
    assert disk.started == ["read a0", "read b0", "read a1", "read b1"]
    assert disk.waited == ["read a0", "read b0"]
    assert len(list(walk)) == 2
    tier.close()


@pytest.mark.parametrize(("buffer_count", "is_read"), [(4, False), (6, True)])
def test_groups_are_read_further_ahead_with_more_buffers(tmp_path: Path, buffer_count: int, is_read: bool) -> None:
    tier = open_tier(tmp_path, pipeline_read=True, buffer_count=buffer_count)
    groups, disk = three_groups(tier), SlowDisk(tier)
    walk = tier.stream_groups(groups)
    next(walk)
    assert ("read b2" in disk.started) is is_read
    walk.close()
    tier.close()


def test_nothing_is_read_ahead_unless_asked(tier: NvmeTier) -> None:
    groups, disk = three_groups(tier), SlowDisk(tier)
    walk = tier.stream_groups(groups)
    next(walk)
    assert disk.started == ["read a0", "read b0"]
    next(walk)
    assert disk.started[4:] == ["read a1", "read b1"]
    walk.close()


def test_a_group_is_written_while_the_next_is_in_use(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, pipeline_write=True)
    groups, disk = three_groups(tier), SlowDisk(tier)
    walk = tier.stream_groups(groups)
    next(walk)[0].fill(5.0)
    next(walk)
    assert disk.started[2:4] == ["write a0", "write b0"]
    assert not {"write a0", "write b0"} & set(disk.waited)
    assert len(list(walk)) == 1
    assert {"write a0", "write b0"} < set(disk.waited)
    assert values(groups[0][0]) == {5.0}
    tier.close()


def test_a_group_is_written_before_the_next_is_lent_unless_asked(tier: NvmeTier) -> None:
    groups = three_groups(tier)
    walk = tier.stream_groups(groups)
    next(walk)[0].fill(5.0)
    next(walk)
    assert values(groups[0][0]) == {5.0}
    walk.close()


def test_many_walks_take_no_more_file_handles_threads_or_buffers(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, pipeline_read=True, pipeline_write=True)
    groups = three_groups(tier)
    gc.collect()
    handles, threads = [], len(os.listdir("/proc/self/task"))
    for _ in range(30):
        assert len(list(tier.stream_groups(groups))) == 3
        handles.append(len(os.listdir("/proc/self/fd")))
        assert len(os.listdir("/proc/self/task")) <= threads + 4
        assert sum(map(len, tier._free.values())) <= 6
    assert handles == sorted(handles, reverse=True)  # what another test left may be closed meanwhile
    tier.close()


# Room.


def test_files_are_whole_blocks_with_their_room_reserved(tier: NvmeTier) -> None:
    status = file_of(tier.allocate("a", NUMEL, F32)).stat()
    assert status.st_size == 2 * 4096
    assert status.st_blocks * 512 >= status.st_size


def test_a_disk_without_room_is_refused_before_anything_is_made(tier: NvmeTier) -> None:
    with pytest.raises(OffloadError) as e:
        tier.allocate("a", 10**15, F32)
    assert all(part in str(e.value) for part in ("/rank0/a", "4000000000000000"))
    assert "nvme_path" in e.value.hint
    assert list(tier._folder.path.iterdir()) == []
    tier.allocate("a", 4, F32)


def test_room_that_another_took_meanwhile_is_refused(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError) as caught:
        tier.allocate("a", 4, F32)
    assert caught.value.value == 16
    assert list(tier._folder.path.iterdir()) == []


def test_a_file_system_that_cannot_reserve_still_gives_zeros(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unable)
    buffer = tier.allocate("a", NUMEL, F32)
    assert values(buffer) == {0.0}
    assert file_of(buffer).stat().st_size == 2 * 4096


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_full_disk_in_the_middle_of_a_walk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipelined: bool
) -> None:
    tier = open_tier(tmp_path, pipeline_read=pipelined, pipeline_write=pipelined)
    groups = three_groups(tier)
    broken = {file_of(buffer) for buffer in (groups[1][0], groups[2][1])}
    write = StateFile.start_writing

    def write_elsewhere(file: StateFile, *rest: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if file.path in broken:
                patch.setattr(file, "path", Path("/dev/full"))
            return write(file, *rest)

    monkeypatch.setattr(StateFile, "start_writing", write_elsewhere)
    walk = tier.stream_groups(groups)
    for index in range(3):
        for buffer in next(walk):
            buffer.fill(index + 1.0)
    with pytest.raises(OffloadError) as caught:
        next(walk)
    assert caught.value.value == 6000
    assert "checkpoint" in caught.value.hint
    assert [[values(buffer) for buffer in group] for group in groups] == [[{1.0}] * 2, [{2.0}] * 2, [{3.0}] * 2]

    groups[1][0].view(0, 1).fill(8.0)  # loading a checkpoint writes pieces
    walk = tier.stream_groups(groups)
    assert [values(next(walk)[0]) for _ in groups] == [{1.0}, {2.0, 8.0}, {3.0}]
    with pytest.raises(OffloadError):  # still full
        next(walk)
    broken.clear()
    assert len(list(tier.stream_groups(groups))) == 3
    files = [file_of(buffer).read_bytes()[: buffer.nbytes] for buffer in (groups[1][0], groups[2][1])]
    assert [set(np.frombuffer(data, "<f4").tolist()) for data in files] == [{2.0, 8.0}, {3.0}]
    for lent in tier.stream_groups(groups):
        lent[0].fill(5.0)
    assert [values(group[0]) for group in groups] == [{5.0}] * 3
    tier.close()


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_short_file_stops_the_walk_and_spoils_no_other(tmp_path: Path, pipelined: bool) -> None:
    tier = open_tier(tmp_path, pipeline_read=pipelined, pipeline_write=pipelined)
    groups = three_groups(tier)
    os.truncate(file_of(groups[1][1]), 4096)
    walk = tier.stream_groups(groups)
    next(walk)[0].fill(6.0)
    with pytest.raises(OffloadError) as caught:
        next(walk)
    assert caught.value.value == str(tmp_path / "polyaccel-0/rank0/b1")
    assert all(part in str(caught.value) for part in ("/b1", "4096"))
    assert [values(buffer) for buffer in (*groups[0], groups[1][0], *groups[2])] == [{6.0}, *[{0.0}] * 4]
    assert file_of(groups[1][1]).stat().st_size == 4096  # not written back, for nobody has read it
    os.truncate(file_of(groups[1][1]), 2 * 4096)
    assert len(list(tier.stream_groups(groups))) == 3
    tier.close()


# Folders.


def test_jobs_on_one_path_do_not_touch_each_other(tmp_path: Path) -> None:
    tiers = [open_tier(tmp_path, run_id=run, rank=rank) for run in ("x", "y") for rank in (0, 1)]
    buffers = [tier.allocate("a", 4, F32) for tier in tiers]
    for index, buffer in enumerate(buffers):
        buffer.fill(float(index))
    assert [values(buffer) for buffer in buffers] == [{0.0}, {1.0}, {2.0}, {3.0}]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/rank?/a")) == [
        f"polyaccel-{run}/rank{rank}/a" for run in "xy" for rank in (0, 1)
    ]
    tiers[0].close()
    assert [values(buffer) for buffer in buffers[1:]] == [{1.0}, {2.0}, {3.0}]
    for tier in tiers:
        tier.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path, tier: NvmeTier) -> None:
    with pytest.raises(OffloadError) as caught:
        open_tier(tmp_path)
    assert caught.value.value == str(tmp_path / "polyaccel-0/rank0")
    assert str(os.getpid()) in str(caught.value)
    buffer = tier.allocate("a", 4, F32)
    assert values(buffer) == {0.0}


def test_places_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError) as caught:
        open_tier(tmp_path / "file")
    assert caught.value.value == str(tmp_path / "file")
    assert "nvme_path" in caught.value.hint
    with pytest.raises(OffloadError) as caught:
        NvmeTier().open(HOST, HOST, TierOptions())
    assert "nvme_path" in str(caught.value)
    with pytest.raises(OffloadError) as caught:
        open_tier(tmp_path, run_id="../x")
    assert "../x" in str(caught.value)


def test_clearing_away_touches_nothing_but_folders_of_the_dead(tmp_path: Path) -> None:
    dead, alien = tmp_path / "polyaccel-dead", tmp_path / "polyaccel-notes"
    for folder in (dead / "rank3", dead / "rank4", alien / "rank0", alien / "rank1x"):
        folder.mkdir(parents=True)
        (folder / "a").touch()
    for lock in (dead / "rank3.lock", dead / "rank4.lock", alien / "rank1x.lock"):
        lock.write_text("host 1\n")
    open_tier(tmp_path).close()
    assert not dead.exists()
    assert sorted(path.name for path in alien.rglob("*")) == ["a", "a", "rank0", "rank1x", "rank1x.lock"]


def test_a_rank_that_is_about_to_lock_its_file_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank of the job looks for the dead between the making of the lock file and the locking."""
    original = fcntl.flock
    seen = []

    def flock(file: int, operation: int) -> None:
        if not seen:
            seen.append(file)
            monkeypatch.setattr(fcntl, "flock", original)
            remove_stale(tmp_path)
            assert (tmp_path / "polyaccel-0" / "rank0.lock").exists()
        original(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    open_tier(tmp_path).close()
    assert seen


def test_a_lock_file_that_vanishes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job may clear the run's folder away between the opening of its lock file and the locking."""
    lock, original = tmp_path / "polyaccel-0" / "rank0.lock", fcntl.flock
    cleared = []

    def flock(file: int, operation: int) -> None:
        if not cleared:
            cleared.append(lock)
            lock.unlink()
            lock.parent.rmdir()
        original(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    tier = open_tier(tmp_path)
    assert cleared
    assert lock.exists()
    with pytest.raises(OffloadError) as caught:
        open_tier(tmp_path)
    assert caught.value.value == str(tmp_path / "polyaccel-0/rank0")
    tier.close()


def test_a_tier_that_nobody_closed_is_cleared_away_with_its_object(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.allocate("a", 4, F32)
    del tier
    assert list(tmp_path.iterdir()) == []
