"""The check of storages says what it does where a storage may hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyaccel.checkpoint.storage.file import FileStorage
from polyaccel.testkit import storage
from polyaccel.testkit.storage import StorageContract


def test_a_reader_that_waits_for_a_writer_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    monkeypatch.setattr(storage, "doing", said.append)

    class Contract(StorageContract):
        def make(self) -> FileStorage:
            return FileStorage(tmp_path)

    Contract().test_a_file_appears_whole()
    assert said == [f"reading a file after chunk {number} of 3 of a write that is under way" for number in (1, 2, 3)]
