"""Two jobs save one tag at once, and one of them may die: the tag is a whole checkpoint, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_table import TABLE, Ends, sample

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.numpy import NumpyBuffer, allocate_numpy
from polyaccel.checkpoint import FileStorage, TensorPiece, open_checkpoint, save_checkpoint
from polyaccel.checkpoint.format.commit import read_latest
from polyaccel.checkpoint.format.save_folders import OWNER, save_folders
from polyaccel.checkpoint.storage.owner import ABANDONED_AFTER_S, OwnerNote, ProcessIdentity
from polyaccel.core.types import DType
from polyaccel.testkit.ranks.threads import run_threads

NUMPY = CpuAccelerator("numpy")
WHOLE = Ends("none", "the tag is one job's checkpoint, whole", code="0")


@pytest.fixture(autouse=True)
def _power_stays_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs die here, and not the machine: what was written is there without a wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Killed(BaseException):
    """The job dies here: nobody catches this."""


class Interrupted(FileStorage):
    """A FileStorage that does something else before its call number `at`."""

    def __init__(self, place: Path, at: int, interruption: Callable[[], None]) -> None:
        super().__init__(place)
        self.at, self.calls, self.interruption = at, 0, interruption

    def _count(self) -> None:
        self.calls += 1
        if self.calls - 1 == self.at:
            self.interruption()

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        self._count()
        super().write(path, chunks)

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        self._count()
        return super().read(path, offset, nbytes)

    def size(self, path: str) -> int | None:
        self._count()
        return super().size(path)

    def names(self, path: str = "") -> tuple[str, ...]:
        self._count()
        return super().names(path)

    def delete_tree(self, path: str) -> None:
        self._count()
        super().delete_tree(path)

    def clear_unfinished(self, path: str = "", *, if_empty: bool = False) -> None:
        self._count()
        super().clear_unfinished(path, if_empty=if_empty)


def save(storage: FileStorage, value: float, tag: str = "t") -> None:
    def work(communicator: Any) -> None:
        piece = TensorPiece("w", "param", (8,), DType.FLOAT32, 0, NumpyBuffer(np.full(8, value, np.float32)))
        scalars = {"value": value}
        save_checkpoint(storage, tag, communicator=communicator, pieces=[piece], scalars=scalars, rank_blobs={})

    run_threads(1, work, accelerator=NUMPY)


def value_of(place: Path, tag: str | None = None) -> float:
    """The one value that every part of the checkpoint holds."""
    reader = open_checkpoint(place, tag)
    buffer = allocate_numpy(8, DType.FLOAT32)
    reader.read_into("w", "param", 0, 8, buffer)
    (value,) = {*buffer.raw.tolist(), reader.scalars["value"]}
    return float(value)


def calls_of_a_save(place: Path) -> int:
    """How many calls a save makes that finds an earlier one of its tag."""
    save(FileStorage(place), 1.0)
    counted = Interrupted(place, -1, lambda: None)
    save(counted, 2.0)
    assert counted.calls > 10
    return counted.calls


def files(place: Path) -> list[str]:
    return sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())


def assert_clean(place: Path, tags: int = 1) -> None:
    """Each tag has its marker and one save of three files; beside them there is `latest` alone."""
    assert len(files(place)) == 1 + tags * 4, files(place)
    assert not [path for path in place.rglob("*") if path.is_dir() and not any(path.iterdir())]


def test_a_save_inside_another_one_of_the_same_tag(tmp_path: Path) -> None:
    """At every call of the one, the other saves from beginning to end."""
    calls = calls_of_a_save(tmp_path / "count")
    for at in sample(range(calls), 40):
        place = tmp_path / str(at)
        save(FileStorage(place), 1.0)
        with TABLE.case("two jobs save one tag", WHOLE):
            save(Interrupted(place, at, lambda place=place: save(FileStorage(place), 3.0)), 2.0)
            assert value_of(place) in (2.0, 3.0)
            assert read_latest(FileStorage(place)) == "t"
            save(FileStorage(place), 4.0)
            assert value_of(place, "t") == 4.0
            assert_clean(place)


def test_a_save_inside_another_one_of_which_either_dies(tmp_path: Path) -> None:
    calls = calls_of_a_save(tmp_path / "count")
    cases = [(at, stop, dies) for at in range(calls) for stop in range(calls) for dies in ("first", "second")]
    for number, (at, stop, dies) in enumerate(sample(cases[::3], 40)):
        place = tmp_path / str(number)
        save(FileStorage(place), 1.0)

        def second(place: Path = place, stop: int = stop, dies: str = dies) -> None:
            try:
                save(Interrupted(place, stop, die), 3.0)
            except Killed:
                if dies == "first":
                    raise

        with TABLE.case(f"two jobs save one tag, the {dies} to begin dies", WHOLE):
            try:
                save(Interrupted(place, at, second), 2.0)
            except Killed:
                assert dies == "first"
            assert value_of(place) in (1.0, 2.0, 3.0)
            save(FileStorage(place), 4.0)
            assert value_of(place, "t") == 4.0
            assert_clean(place)


def die() -> None:
    raise Killed


def dead_process() -> ProcessIdentity:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        note = ProcessIdentity(ProcessIdentity.me().machine, process.pid, started_of(process.pid))
        assert note.is_alive(0.0)
        process.communicate(b"\n")
    return note


def started_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def leave(place: Path, owner: ProcessIdentity, tag: str, since_s: float) -> Path:
    """What a save of `owner` would leave if it were killed now: a folder, a file in it and unfinished files."""
    folder = place / tag / "save-0001-00000000"
    folder.mkdir(parents=True)
    note = OwnerNote(host="h", machine=owner.machine, pid=owner.pid, started=owner.started, since_s=since_s)
    (folder / OWNER).write_text(note.model_dump_json())
    (folder / "rank00000.safetensors").write_bytes(b"half")
    for path in (folder / "rank00001.safetensors", place / "latest", place / tag / "commit.json"):
        path.with_name(f".{path.name}.{owner.token}-0.tmp").write_bytes(b"half")
    return folder


def test_what_a_killed_save_left_goes_with_the_next_save_of_any_tag(tmp_path: Path) -> None:
    with TABLE.case(
        "files of a save that was killed", Ends("none", "the next save clears them, whatever its tag", code="0")
    ):
        leave(tmp_path, dead_process(), "step1", since_s=0.0)
        (tmp_path / "step2" / "save-0001-12345678").mkdir(parents=True)  # before it wrote anything
        save(FileStorage(tmp_path), 1.0)
        assert_clean(tmp_path)


@pytest.mark.parametrize("whose", ["living", "another host's"])
def test_what_a_living_process_writes_stays(tmp_path: Path, whose: str, caplog: pytest.LogCaptureFixture) -> None:
    parent = ProcessIdentity(ProcessIdentity.me().machine, os.getppid(), started_of(os.getppid()))
    owner = parent if whose == "living" else ProcessIdentity(12345, 1, 1)
    now = Path(tmp_path).stat().st_mtime
    with TABLE.case(
        "files of a save in progress",
        Ends("a warning: who is saving", "both saves are whole", code="0", left="the files of the save in progress"),
    ):
        folder = leave(tmp_path, owner, "t", since_s=now)
        save(FileStorage(tmp_path), 1.0)
        assert value_of(tmp_path) == 1.0
        assert len(save_folders(FileStorage(tmp_path), "t")) == 2
        assert (folder / "rank00000.safetensors").exists()
        assert len([name for name in files(tmp_path) if name.endswith(".tmp")]) == 3
        assert f"process {owner.pid} on h is saving 't' in {tmp_path} too" in caplog.text


def test_what_another_host_left_goes_after_a_day(tmp_path: Path) -> None:
    with TABLE.case("files of another host, a day old", Ends("none", "the next save clears them", code="0")):
        leave(
            tmp_path, ProcessIdentity(12345, 1, 1), "t", since_s=Path(tmp_path).stat().st_mtime - 2 * ABANDONED_AFTER_S
        )
        for path in tmp_path.rglob(".*.tmp"):
            os.utime(path, (0.0, 0.0))
        save(FileStorage(tmp_path), 1.0)
        assert_clean(tmp_path)


def test_folders_that_are_not_ours_stay(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "mine" / "save-0001").mkdir(parents=True)
    (tmp_path / "mine" / "save-0001" / "notes.txt").write_text("keep")
    (tmp_path / "mine" / ".draft.tmp.txt").write_text("keep")
    save(FileStorage(tmp_path), 1.0)
    assert (tmp_path / "logs").is_dir()
    assert [path for path in files(tmp_path) if path.startswith("mine/")] == [
        "mine/.draft.tmp.txt",
        "mine/save-0001/notes.txt",
    ]
