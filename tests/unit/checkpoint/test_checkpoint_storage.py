"""A file appears whole or not at all, and stays once written."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest

from polyaccel.checkpoint.storage.file import FileStorage
from polyaccel.checkpoint.storage.node_local import NodeLocalStorage
from polyaccel.errors import CheckpointError
from polyaccel.testkit.storage import StorageContract


@pytest.fixture
def storage(tmp_path: Path) -> FileStorage:
    return FileStorage(tmp_path / "not" / "yet" / "there")


def contents(storage: FileStorage, path: str) -> bytes:
    size = storage.size(path)
    assert size is not None
    return storage.read(path, 0, size)


class TestFileStorage(StorageContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.place = tmp_path

    def make(self) -> FileStorage:
        return FileStorage(self.place / "not" / "yet" / "there")


def test_a_failed_write_leaves_the_old_file_and_no_debris(storage: FileStorage) -> None:
    def broken() -> Iterator[bytes]:
        yield b"new"
        raise KeyboardInterrupt

    storage.write("a/file", [b"old"])
    with pytest.raises(KeyboardInterrupt):
        storage.write("a/file", broken())
    assert contents(storage, "a/file") == b"old"
    assert os.listdir(Path(storage.location, "a")) == ["file"]


def test_the_file_is_synced_before_its_name_and_the_directory_after(
    storage: FileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write("a/file", [b"old"])
    events: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        place = os.readlink(f"/proc/self/fd/{descriptor}")
        name = re.sub(r"[.][-0-9a-f]+[.]tmp", ".*.tmp", os.path.basename(place))
        events.append(f"fsync {name} {os.fstat(descriptor).st_size if os.path.isfile(place) else ''}")
        real_fsync(descriptor)

    def replace(source: Any, target: Any) -> None:
        events.append(f"replace {Path(target).name}")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    storage.write("a/file", [b"newer"])
    # The five bytes are in the file, not in a buffer of Python's, when it is synced.
    assert [event.strip() for event in events] == ["fsync .file.*.tmp 5", "replace file", "fsync a"]
    events.clear()
    storage.write("b/c/file", [b"1"])
    made = [event.strip() for event in events]
    assert made == ["fsync there", "fsync b", "fsync .file.*.tmp 1", "replace file", "fsync c"]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_or_broken_disk_is_explained_and_loses_nothing(
    storage: FileStorage, monkeypatch: pytest.MonkeyPatch, fails: str, code: int
) -> None:
    storage.write("a/file", [b"old"])

    def broken(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, broken)
        with pytest.raises(CheckpointError) as caught:
            storage.write("a/file", [b"new"])
        assert caught.value.value == "a/file"
    assert ("is full" in caught.value.hint) == (code != errno.EIO)
    assert contents(storage, "a/file") == b"old"
    assert os.listdir(Path(storage.location, "a")) == ["file"]


def test_too_little_space_is_said_before_writing(storage: FileStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=999))
    storage.check_space(999)
    with pytest.raises(CheckpointError) as caught:
        storage.check_space(1000)
    assert caught.value.value == 1000
    assert all(part in str(caught.value) for part in ("1,000", "999"))


def test_many_ranks_may_make_the_same_folders_at_once(storage: FileStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = 8
    barrier = Barrier(ranks)
    is_dir: Callable[[Path], bool] = Path.is_dir

    def all_together(path: Path) -> bool:
        found = is_dir(path)
        if path.name == "folder":
            barrier.wait(60)  # every rank has seen that it is missing, as with a stale NFS cache
        return found

    monkeypatch.setattr(Path, "is_dir", all_together)
    threads = [Thread(target=storage.write, args=(f"folder/{rank}", [b"x"])) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert storage.names("folder") == tuple(str(rank) for rank in range(ranks))


def test_a_reader_may_remove_a_file_as_soon_as_it_appears(
    storage: FileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 of a save in the background removes the notes of other ranks, with their folder, once it has read them."""
    replace, removed = os.replace, []

    def read_and_removed(source: Path, target: Path) -> None:
        replace(source, target)
        removed.append(Path(target).read_bytes())
        shutil.rmtree(Path(target).parent)

    monkeypatch.setattr(os, "replace", read_and_removed)
    storage.write("told/rank00001.json", [b"note"])
    assert removed == [b"note"]
    assert storage.names("told") == ()


def test_a_short_file_is_named(storage: FileStorage) -> None:
    storage.write("file", [b"12345"])
    with pytest.raises(CheckpointError) as caught:
        storage.read("file", 3, 4)
    assert caught.value.value == "file"
    assert "there/file" in str(caught.value)


@pytest.mark.parametrize("path", ["../secret", "a/../../secret", "/etc/passwd"])
def test_a_path_that_leads_out_is_refused(storage: FileStorage, path: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        storage.read(path, 0, 1)
    assert caught.value.value == path


def test_the_operating_systems_errors_name_the_file(storage: FileStorage) -> None:
    with pytest.raises(CheckpointError) as caught:
        storage.read("none", 0, 1)
    assert caught.value.value == "none"
    assert "there/none" in str(caught.value)
    assert isinstance(caught.value, OSError)
    storage.write("file", [b""])
    with pytest.raises(CheckpointError) as caught:
        storage.write("file/below", [b""])
    assert caught.value.value == "file/below"


@pytest.mark.parametrize("kind", [FileStorage, NodeLocalStorage])
def test_a_relative_location_is_the_folder_of_the_moment_it_was_named(kind, tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    storage = kind("runs")
    monkeypatch.chdir(there)
    storage.write("a/b", [b"1"])
    assert (here / "runs" / "a" / "b").read_bytes() == b"1"
    assert not list(there.iterdir())
