"""Checkpoints in the stores of fsspec: here in a process's own memory; tests/procs/s3 has a server."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from itertools import count
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.numpy import NumpyBuffer, allocate_numpy
from polyaccel.checkpoint import FileStorage, TensorPiece, list_checkpoints, open_checkpoint, save_checkpoint
from polyaccel.checkpoint.retention import Retention
from polyaccel.checkpoint.storage import fsspec as module
from polyaccel.checkpoint.storage.fsspec import FsspecStorage, part_nbytes
from polyaccel.comm.base import Communicator
from polyaccel.core.install_line import install_line
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.testkit.storage import StorageContract

pytest.importorskip("fsspec")
_places = count()


@pytest.fixture
def place() -> Iterator[str]:
    """A URL of memory that nobody has used, empty again afterwards."""
    url = f"memory://polyaccel-{next(_places)}/runs"
    yield url
    FsspecStorage(url).delete_tree("")


class TestMemoryStore(StorageContract):
    @pytest.fixture(autouse=True)
    def _place(self, place: str) -> None:
        self.url = place

    def make(self) -> FsspecStorage:
        return FsspecStorage(self.url)

    def test_chunks_are_not_gathered_in_memory(self) -> None:
        raise SkipTest("the store itself is this process's memory")


def save(communicator: Communicator, url: str, step: int) -> None:
    """Numbers 0 to 29, in parts of the ranks."""
    numel = 30 // communicator.world_size
    data = np.arange(communicator.rank * numel, (communicator.rank + 1) * numel, dtype=np.float32) + step
    save_checkpoint(
        FsspecStorage(url),
        f"step{step}",
        communicator=communicator,
        pieces=[TensorPiece("w", "param", (5, 6), DType.FLOAT32, communicator.rank * numel, NumpyBuffer(data))],
        scalars={"step": step},
        rank_blobs={"rng": bytes([communicator.rank])},
        retention=Retention(keep_last=2),
    )


def load(communicator: Communicator, url: str) -> list[float]:
    reader = open_checkpoint(FsspecStorage(url), communicator=communicator)
    numel = 30 // communicator.world_size
    buffer = allocate_numpy(numel, DType.FLOAT32)
    reader.read_into("w", "param", communicator.rank * numel, numel, buffer)
    return [float(value) for value in buffer.raw]


def test_two_ranks_save_and_three_load(place: str) -> None:
    numpy = CpuAccelerator("numpy")
    for step in (1, 2, 3):
        run_threads(2, save, place, step, accelerator=numpy)
    parts = run_threads(3, load, place, accelerator=numpy)
    assert [value for part in parts for value in part] == [float(value) + 3 for value in range(30)]
    assert [status.tag for status in list_checkpoints(FsspecStorage(place))] == ["step3", "step2"]
    assert FsspecStorage(place).names() == ("latest", "step2", "step3")


def test_an_engine_saves_through_it_by_name(place: str) -> None:
    torch = pytest.importorskip("torch")
    import polyaccel

    config: dict[str, Any] = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "checkpoint": {"storage": "fsspec", "async": False},  # another process has another memory
    }
    engine, *_ = polyaccel.initialize(model=torch.nn.Linear(2, 1), config=config)
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
    engine.save_checkpoint(place, client_state={"epoch": 3})
    path, client_state = engine.load_checkpoint(place)
    assert (path, client_state) == (f"{place}/global_step1", {"epoch": 3})
    engine.destroy()


@pytest.mark.parametrize("location", ["/tmp/runs", "s3:/bucket/runs", "file:///tmp/runs", "sftp://host/runs"])
def test_a_place_whose_files_do_not_appear_whole_is_refused(location: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        FsspecStorage(location).write("latest", [b"x"])
    assert caught.value.value == location
    assert all(part in str(caught.value) for part in ("URLs", "s3://"))
    assert "'s3://bucket/runs'" in caught.value.hint


def test_a_folder_is_not_made_of_a_url(tmp_path: Path) -> None:
    """A run whose checkpoints went to the local disk of a host that is gone has none."""
    with pytest.raises(CheckpointError) as caught:
        FileStorage("s3://bucket/runs")
    assert caught.value.value == "s3://bucket/runs"
    assert "URL" in str(caught.value)
    assert '"checkpoint": {"storage": "fsspec"}' in caught.value.hint
    FileStorage(tmp_path / "a:" / "b").write("latest", [b"x"])


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> str:
        raise PackageNotFoundError(name)

    assert FsspecStorage.probe().usable
    monkeypatch.setattr(module, "version", not_found)
    probe = FsspecStorage.probe()
    assert (probe.usable, install_line("fsspec") in probe.reason) == (False, True)
    for name in ("fsspec.core", "s3fs"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CheckpointError) as caught:
        FsspecStorage("s3://bucket/runs").names()
    assert caught.value.value == ""
    assert "s3://bucket/runs" in str(caught.value)
    assert caught.value.hint == install_line("fsspec")


def test_ten_thousand_parts_reach_far() -> None:
    """As far as S3's largest object, in parts that S3 takes."""
    written = 0
    sizes = []
    for _ in range(10_000):
        sizes.append(part_nbytes(written))
        written += sizes[-1]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[1000], sizes[2000], sizes[3000]) == (8 << 20, 16 << 20, 32 << 20, 64 << 20)
    assert written > 5 << 40
    assert max(sizes) < 5 << 30


class FailingFile:
    """An upload whose last request fails, as does taking its parts back."""

    closed = False
    blocksize = 0

    def write(self, data: bytes) -> None:
        pass

    def tell(self) -> int:
        return 0

    def close(self) -> None:
        raise ConnectionError("the network is gone")

    def discard(self) -> None:
        raise ConnectionError("and stays away")


class FailingStore:
    protocol = ("s3", "s3a")

    def __init__(self) -> None:
        self.file = FailingFile()

    def open(self, place: str, mode: str, **options: Any) -> FailingFile:
        assert (mode, options["autocommit"]) == ("wb", False)
        return self.file


def test_an_upload_that_fails_is_explained_and_its_parts_are_taken_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = FailingStore()
    monkeypatch.setattr(FsspecStorage, "_open", lambda self, path: (store, f"bucket/runs/{path}"))
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(CheckpointError) as caught,
    ):
        FsspecStorage("s3://bucket/runs").write("t/file", [bytes(1 << 20)] * 9)
    assert caught.value.value == "t/file"
    assert "s3://bucket/runs/t/file" in str(caught.value)
    assert "can be reached" in caught.value.hint
    assert store.file.closed
    assert "they take room until they are a day old" in caplog.text
    assert not module._uploading
