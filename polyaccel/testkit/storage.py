"""The contract of storages as tests: subclass `StorageContract` and say how to make yours over an empty place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from threading import Thread

from polyaccel.checkpoint.storage import Storage
from polyaccel.testkit.contract import refused
from polyaccel.types import Probe

_MIB = 1 << 20


class StorageContract(ABC):
    """The tests that every storage passes."""

    @abstractmethod
    def make(self) -> Storage:
        """A storage over the same empty, or not yet existing, place in every call of one test."""

    def test_probes(self) -> None:
        probe = type(self.make()).probe()
        assert isinstance(probe, Probe)
        assert probe.reason

    def test_files_are_written_and_read(self) -> None:
        storage = self.make()
        storage.write("a/b/one", [b"12", b"", b"345"])
        storage.write("a/two", [])
        assert _contents(storage, "a/b/one") == b"12345"
        assert storage.read("a/b/one", 1, 3) == b"234"
        assert storage.read("a/two", 0, 0) == b""
        sizes = (storage.size("a/two"), storage.size("a/b"), storage.size("a/none"))
        assert sizes == (0, None, None), f"sizes of an empty file, a folder and nothing: {sizes}"

    def test_a_file_may_be_large(self) -> None:
        storage = self.make()
        storage.write("large", (bytes([number]) * _MIB for number in range(5)))
        assert storage.size("large") == 5 * _MIB
        assert storage.read("large", 4 * _MIB - 1, 2) == b"\3\4"

    def test_names_are_sorted_and_only_of_one_folder(self) -> None:
        storage = self.make()
        assert storage.names() == ()
        for path in ("b/two", "b/c/three", "a/one"):
            storage.write(path, [b"x"])
        assert (storage.names(), storage.names("b"), storage.names("none")) == (("a", "b"), ("c", "two"), ())

    def test_a_file_is_replaced(self) -> None:
        storage = self.make()
        storage.write("folder/latest", [b"a longer text"])
        storage.write("folder/latest", [b"short"])
        assert _contents(self.make(), "folder/latest") == b"short"

    def test_a_failed_write_leaves_the_file_as_it_was(self) -> None:
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
            raise AssertionError("a failed write was taken for whole")
        assert _contents(storage, "a/file") == b"old"
        assert storage.size("a/another") is None, "half a file stands there"
        assert storage.names("a") == ("file",), "what was not finished is listed"

    def test_a_file_appears_whole(self) -> None:
        """Readers find the former contents until the last chunk is written."""
        storage, seen = self.make(), []
        storage.write("file", [b"old"])

        def chunks() -> Iterator[bytes]:
            for _ in range(3):
                yield b"new"
                seen.append(_contents(self.make(), "file"))

        storage.write("file", chunks())
        assert seen == [b"old"] * 3, f"readers saw {seen}"
        assert _contents(storage, "file") == b"new" * 3

    def test_a_tree_is_deleted(self) -> None:
        storage = self.make()
        for path in ("a/b/one", "a/b/c/two", "a/three"):
            storage.write(path, [b"x"])
        storage.delete_tree("a/b")
        storage.delete_tree("a/b")
        assert (storage.names("a"), storage.size("a/b/one"), storage.size("a/three")) == (("three",), None, 1)

    def test_what_is_not_there_is_an_error(self) -> None:
        storage = self.make()
        storage.write("file", [b"12345"])
        refused(lambda: storage.read("file", 3, 4), "reading behind the end of a file")
        refused(lambda: storage.read("none", 0, 1), "reading a file that does not exist")

    def test_paths_stay_inside(self) -> None:
        storage = self.make()
        for path in ("../secret", "a/../../secret", "/etc/passwd"):
            refused(lambda p=path: storage.write(p, [b"x"]), f"writing to {path}")  # type: ignore[misc]
            refused(lambda p=path: storage.read(p, 0, 1), f"reading {path}")  # type: ignore[misc]

    def test_many_ranks_write_at_once(self) -> None:
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
        assert not errors, f"{errors[0]!r}"
        storage = self.make()
        assert storage.names("step/shard") == tuple(str(rank) for rank in range(8))
        assert all(_contents(storage, f"step/shard/{rank}") == bytes([rank]) * 1000 for rank in range(8))

    def test_space_is_only_refused_when_there_is_none(self) -> None:
        self.make().check_space(1)


def _contents(storage: Storage, path: str) -> bytes:
    size = storage.size(path)
    assert size is not None, f"{path} is not there"
    return storage.read(path, 0, size)
