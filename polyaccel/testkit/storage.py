"""The contract of storages as tests: subclass `StorageContract` and implement `make`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from unittest import SkipTest

from polyaccel.accelerators.memory.host import memory_stats, reset_peak
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.core.types import Probe
from polyaccel.errors import CheckpointError
from polyaccel.testkit.comparison import equal, refused, same_bytes, shown
from polyaccel.testkit.growth import keeps_nothing
from polyaccel.testkit.progress import doing

_MIB = 1 << 20
_OPEN_FILES = Path("/proc/self/fd")


class StorageContract(ABC):
    """The tests that every storage passes."""

    @abstractmethod
    def make(self) -> Storage:
        """Return a storage over the same empty, or not yet existing, place in every call of one test."""

    def test_probes(self) -> None:
        """The probe reports whether the storage could be used here, and why: `doctor` shows it."""
        probe = type(self.make()).probe()
        equal(type(probe), Probe, "type of what probe() gives")
        equal(bool(probe.reason), True, "whether probe() gives a reason")
        equal(type(self.make().is_shared), bool, "type of is_shared, which is whether all ranks see the same files")

    def test_files_are_written_and_read(self) -> None:
        """Chunks are put together, any part of a file is read, and `size` separates files from folders: readers of a
        checkpoint take slices."""
        storage = self.make()
        storage.write("a/b/one", [b"12", b"", memoryview(b"-345")[1:]])
        storage.write("a/two", [])
        same_bytes(_contents(storage, "a/b/one"), b"12345", "a file of three chunks")
        same_bytes(storage.read("a/b/one", 1, 3), b"234", "three bytes from byte 1")
        same_bytes(storage.read("a/two", 0, 0), b"", "nothing of an empty file")
        target = bytearray(b"....")
        storage.read_into("a/b/one", 1, memoryview(target)[:3])
        same_bytes(bytes(target), b"234.", "three bytes from byte 1, read into the first three of four")
        sizes = (storage.size("a/two"), storage.size("a/b"), storage.size("a/none"))
        equal(sizes, (0, None, None), "sizes of an empty file, a folder and nothing")

    def test_a_file_may_be_large(self) -> None:
        """A file of many chunks has all of them, in order: tensors are larger than any buffer."""
        storage = self.make()
        storage.write("large", (bytes([number]) * _MIB for number in range(5)))
        equal(storage.size("large"), 5 * _MIB, "size of five chunks of 1 MiB")
        same_bytes(storage.read("large", 4 * _MIB - 1, 2), b"\3\4", "the bytes where the last chunk begins")

    def test_chunks_are_not_gathered_in_memory(self) -> None:
        """A write needs memory for its largest chunk and not for the file, which may be larger than the host has."""
        storage = self.make()
        reset_peak()
        before = memory_stats().allocated_nbytes
        if memory_stats().peak_nbytes - before > 8 * _MIB:
            raise SkipTest("this system cannot reset the peak of a process's memory")
        storage.write("large", (bytes([number]) * (4 * _MIB) for number in range(16)))
        more = memory_stats().peak_nbytes - before
        if more > 40 * _MIB:
            raise AssertionError(
                f"memory of a write of 16 chunks of 4 MiB: expected that of few chunks, got {more // _MIB} MiB"
            )

    def test_names_are_sorted_and_only_of_one_folder(self) -> None:
        """`names` lists what stands directly in a folder, sorted: the newest checkpoint is found by it."""
        storage = self.make()
        equal(storage.names(), (), "names of an empty place")
        for path in ("b/two", "b/c/three", "a/one"):
            storage.write(path, [b"x"])
        names = (storage.names(), storage.names("b"), storage.names("none"))
        equal(names, (("a", "b"), ("c", "two"), ()), "names of the place, of a folder in it, and of none")

    def test_a_file_is_replaced(self) -> None:
        """The later of two writes is what everybody reads, whole: `latest` moves so."""
        storage = self.make()
        storage.write("folder/latest", [b"a longer text"])
        storage.write("folder/latest", [b"short"])
        same_bytes(_contents(self.make(), "folder/latest"), b"short", "a file that was written twice")

    def test_a_failed_write_leaves_the_file_as_it_was(self) -> None:
        """A write whose chunks fail raises that error and leaves the former file, or none: half a checkpoint must not
        look like one."""

        def failing() -> Iterator[bytes]:
            yield b"new"
            raise RuntimeError("the writer failed")

        storage = self.make()
        storage.write("a/file", [b"old"])
        for path in ("a/file", "a/another"):
            try:
                storage.write(path, failing())
            except RuntimeError:
                continue
            raise AssertionError(f"a write of {path} whose chunks fail: expected their RuntimeError, got none")
        same_bytes(_contents(storage, "a/file"), b"old", "a file after a write of it failed")
        equal(storage.size("a/another"), None, "size of a new file whose write failed")
        equal(storage.names("a"), ("file",), "names where writes failed")

    def test_a_file_appears_whole(self) -> None:
        """Readers find the former contents until the last chunk is written: a process may end in between."""
        storage, seen = self.make(), []
        storage.write("file", [b"old"])

        def chunks() -> Iterator[bytes]:
            for number in range(3):
                yield b"new"
                doing(f"reading a file after chunk {number + 1} of 3 of a write that is under way")
                seen.append(_contents(self.make(), "file"))

        storage.write("file", chunks())
        equal(seen, [b"old"] * 3, "contents that readers saw between the chunks of a write")
        same_bytes(_contents(storage, "file"), b"new" * 3, "a file after its write")

    def test_a_tree_is_deleted(self) -> None:
        """`delete_tree` removes a folder with all in it and nothing else, and may be called again: old checkpoints go
        so."""
        storage = self.make()
        for path in ("a/b/one", "a/b/c/two", "a/three"):
            storage.write(path, [b"x"])
        storage.delete_tree("a/b")
        storage.delete_tree("a/b")
        found = (storage.names("a"), storage.size("a/b/one"), storage.size("a/three"))
        equal(found, (("three",), None, 1), "names left, and sizes of a deleted file and of its neighbour")

    def test_a_file_is_deleted(self) -> None:
        """`delete` removes a file and nothing else, and may be called again: a checkpoint that goes loses its commit
        marker first."""
        storage = self.make()
        for path in ("a/one", "a/one.more", "a/two"):
            storage.write(path, [b"x"])
        storage.delete("a/one")
        storage.delete("a/one")
        storage.delete("none/at/all")
        found = (storage.names("a"), storage.size("a/one"), storage.size("a/two"))
        equal(found, (("one.more", "two"), None, 1), "names left, and sizes of a deleted file and of its neighbour")

    def test_what_was_replaced_or_deleted_takes_no_room(self) -> None:
        """Once files were replaced, failed and deleted, what they needed is free again, where the place is a folder:
        a run saves for weeks."""
        storage = self.make()

        def failing() -> Iterator[bytes]:
            yield bytes(_MIB)
            raise RuntimeError("the writer failed")

        for number in range(4):
            storage.write("run/file", [bytes([number]) * _MIB] * 2)
            storage.write(f"run/step{number}/file", [bytes(_MIB)])
            storage.delete_tree(f"run/step{number}")
        for _ in range(3):
            try:
                storage.write("run/failed", failing())
            except RuntimeError:
                continue
        storage.clear_unfinished("run")
        if not os.path.isdir(storage.location):
            raise SkipTest("the location is not a folder of this machine")
        _takes(storage.location, 2 * _MIB, "bytes on disk of a file of 2 MiB that was written four times")
        storage.delete_tree("run")
        _takes(storage.location, 0, "bytes on disk once everything was deleted")

    def test_nothing_is_kept_of_files(self) -> None:
        """Writing and reading leave no memory and no open file behind: a run saves for weeks."""
        storage = self.make()

        def use() -> None:
            for number in range(16):
                storage.write(f"file{number % 2}", [bytes([number]) * _MIB])
                storage.read(f"file{number % 2}", 0, _MIB)

        use()
        before = len(os.listdir(_OPEN_FILES)) if _OPEN_FILES.is_dir() else 0
        keeps_nothing(use, 16 * _MIB, "memory of writing and reading files")
        after = len(os.listdir(_OPEN_FILES)) if _OPEN_FILES.is_dir() else 0
        if after > before + 4:
            raise AssertionError(f"open files after 32 writes and reads: expected about {before}, got {after}")

    def test_what_is_not_there_is_an_error(self) -> None:
        """Reading behind the end of a file, or of one that does not exist, is a CheckpointError: short contents would
        be trained on."""
        storage = self.make()
        storage.write("file", [b"12345"])
        refused(lambda: storage.read("file", 3, 4), "reading behind the end of a file", CheckpointError)
        refused(lambda: storage.read("none", 0, 1), "reading a file that does not exist", CheckpointError)
        four = memoryview(bytearray(4))
        refused(lambda: storage.read_into("file", 3, four), "reading into memory behind the end", CheckpointError)

    def test_paths_stay_inside(self) -> None:
        """A path that leads out of the place is a CheckpointError, whatever a manifest contains."""
        storage = self.make()
        for path in ("../secret", "a/../../secret", "/etc/passwd"):
            refused(lambda p=path: storage.write(p, [b"x"]), f"writing to {path}", CheckpointError)  # type: ignore[misc]
            refused(lambda p=path: storage.read(p, 0, 1), f"reading {path}", CheckpointError)  # type: ignore[misc]

    def test_many_ranks_write_at_once(self) -> None:
        """Ranks that write files of one new folder at once all succeed: a checkpoint begins so."""
        errors: list[BaseException] = []

        def write(rank: int) -> None:
            try:
                self.make().write(f"step/shard/{rank}", [bytes([rank]) * 1000])
            except BaseException as error:
                errors.append(error)

        threads = [Thread(target=write, args=(rank,), daemon=True) for rank in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        equal([shown(error) for error in errors], [], "errors of eight ranks that write at once")
        storage = self.make()
        equal(storage.names("step/shard"), tuple(str(rank) for rank in range(8)), "names of eight ranks' files")
        for rank in range(8):
            same_bytes(_contents(storage, f"step/shard/{rank}"), bytes([rank]) * 1000, f"the file of rank {rank}")

    def test_space_is_only_refused_when_there_is_none(self) -> None:
        """`check_space` lets a byte pass: a storage without numbers refuses nothing."""
        self.make().check_space(1)


def _takes(location: str, most_nbytes: int, what: str) -> None:
    """Compare the files below a folder with what they may have together; a sixteenth of a MiB more is bookkeeping."""
    doing(what)
    files = [file for file in Path(location).rglob("*") if file.is_file()]
    nbytes = sum(file.stat().st_size for file in files)
    if nbytes > most_nbytes + _MIB // 16:
        largest = max(files, key=lambda file: file.stat().st_size).relative_to(location)
        raise AssertionError(f"{what}: expected {most_nbytes} or little more, got {nbytes}, most of them in {largest}")


def _contents(storage: Storage, path: str) -> bytes:
    size = storage.size(path)
    if size is None:
        raise AssertionError(f"size of {path}, which was written: expected a number, got None")
    return storage.read(path, 0, size)
