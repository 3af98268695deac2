"""Checkpoints in S3: a real server, moto's, on this host (`make test-s3`, in an environment that has it)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("moto.server", reason="make test-s3 has moto and s3fs")
pytest.importorskip("s3fs", reason="make test-s3 has moto and s3fs")

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.memory.numpy import NumpyBuffer, allocate_numpy
from polyaccel.checkpoint import TensorPiece, list_checkpoints, open_checkpoint, save_checkpoint
from polyaccel.checkpoint.retention import Retention
from polyaccel.checkpoint.storage.fsspec import FsspecStorage
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.testkit.storage import StorageContract

_MIB = 1 << 20
_places = count()
SERVER = """
import ctypes, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # the server ends with the tests
from moto.server import main
main(["-H", "127.0.0.1", "-p", "0"])
"""


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    """The options of a server of this module's own, with one bucket."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    port = next(found[1] for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:(\d+)", line)))
    log = threading.Thread(target=server.stderr.read, daemon=True)  # or the server would wait for its log to be read
    log.start()
    found = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "someone", "secret": "something"}
    _store(found).mkdir("bucket")
    yield found
    server.kill()
    server.wait(60)
    log.join(60)
    server.stderr.close()


def _store(options: dict[str, Any]) -> Any:
    import s3fs

    return s3fs.S3FileSystem(**options)


def _uploads(options: dict[str, Any]) -> list[str]:
    """The keys of the uploads that have begun and not ended."""
    found = _store(options).call_s3("list_multipart_uploads", Bucket="bucket")
    return sorted(upload["Key"] for upload in found.get("Uploads", ()))


@pytest.fixture
def url() -> str:
    return f"s3://bucket/{os.getpid()}/{next(_places)}"


class TestS3(StorageContract):
    @pytest.fixture(autouse=True)
    def _place(self, url: str, options: dict[str, Any]) -> None:
        self.url, self.options = url, options

    def make(self) -> FsspecStorage:
        return FsspecStorage(self.url, self.options)


def test_a_large_file_that_fails_leaves_nothing(url: str, options: dict[str, Any]) -> None:
    """Its parts had been uploaded; the former object stays."""
    storage = FsspecStorage(url, options)
    storage.write("t/file", [b"old"])
    seen = []

    def failing() -> Iterator[bytes]:
        for _ in range(5):
            yield bytes(6 * _MIB)
        seen.extend(_uploads(options))
        seen.append(storage.read("t/file", 0, 3).decode())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storage.write("t/file", failing())
    key = f"{url.removeprefix('s3://bucket/')}/t/file"
    assert seen == [key, "old"]
    assert (storage.read("t/file", 0, 3), storage.names("t")) == (b"old", ("file",))
    assert _uploads(options) == []


def test_a_large_file_is_read_by_ranges(url: str, options: dict[str, Any]) -> None:
    storage = FsspecStorage(url, options)
    whole = np.random.default_rng(0).bytes(20 * _MIB + 7)
    storage.write("file", (whole[at : at + 3 * _MIB] for at in range(0, len(whole), 3 * _MIB)))
    assert storage.size("file") == len(whole)
    for at in (0, 8 * _MIB - 3, 17 * _MIB, len(whole) - 9):
        assert storage.read("file", at, 9) == whole[at : at + 9]
    with pytest.raises(CheckpointError) as caught:
        storage.read("file", len(whole) - 3, 4)
    assert caught.value.value == "file"


def test_equal_parts_for_stores_that_want_them(url: str, options: dict[str, Any]) -> None:
    storage = FsspecStorage(url, {**options, "fixed_upload_size": True})
    storage.write("file", (bytes([number]) * (10 * _MIB) for number in range(14)))
    assert storage.size("file") == 140 * _MIB
    assert storage.read("file", 70 * _MIB - 1, 2) == b"\6\7"


KILLED = """
import os, signal, sys
from polyaccel.checkpoint.storage.fsspec import FsspecStorage

def chunks():
    for _ in range(5):
        yield bytes(6 << 20)
    os.kill(os.getpid(), signal.SIGKILL)

options = {"endpoint_url": sys.argv[2], "key": "someone", "secret": "something"}
FsspecStorage(sys.argv[1], options).write(sys.argv[3], chunks())
"""


@pytest.mark.parametrize("by", ["clear_unfinished", "delete_tree"])
def test_what_a_killed_process_uploaded_is_taken_back(url: str, options: dict[str, Any], by: str) -> None:
    """moto says of every upload that it began in 2010. Those of this process stay even so."""
    killed = subprocess.run([sys.executable, "-c", KILLED, url, options["endpoint_url"], "t/rank"], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    storage, base = FsspecStorage(url, options), url.removeprefix("s3://bucket/")
    assert _uploads(options) == [f"{base}/t/rank"]
    assert (storage.size("t/rank"), storage.names()) == (None, ())
    storage.clear_unfinished()  # that of the folder above
    assert _uploads(options) == [f"{base}/t/rank"]
    seen = []

    def chunks() -> Iterator[bytes]:
        yield bytes(9 * _MIB)
        if by == "delete_tree":
            storage.delete_tree("t")
        else:
            storage.clear_unfinished("t")
        seen.extend(_uploads(options))
        yield b"end"

    storage.write("t/mine", chunks())
    assert seen == [f"{base}/t/mine"]
    assert storage.size("t/mine") == 9 * _MIB + 3
    assert _uploads(options) == []


def save(communicator: Communicator, url: str, options: dict[str, Any], step: int) -> None:
    numel = 6 * _MIB // communicator.world_size
    data = np.arange(communicator.rank * numel, (communicator.rank + 1) * numel, dtype=np.float32) + step
    save_checkpoint(
        FsspecStorage(url, options),
        f"step{step}",
        communicator=communicator,
        pieces=[TensorPiece("w", "param", (6, _MIB), DType.FLOAT32, communicator.rank * numel, NumpyBuffer(data))],
        scalars={"step": step},
        rank_blobs={"rng": bytes([communicator.rank])},
        retention=Retention(keep_last=2),
    )


def load(communicator: Communicator, url: str, options: dict[str, Any]) -> float:
    reader = open_checkpoint(FsspecStorage(url, options), communicator=communicator)
    numel = 6 * _MIB // communicator.world_size
    buffer = allocate_numpy(numel, DType.FLOAT32)
    reader.read_into("w", "param", communicator.rank * numel, numel, buffer)
    expected = np.arange(communicator.rank * numel, (communicator.rank + 1) * numel, dtype=np.float32) + 3
    return float(np.abs(buffer.raw - expected).max())


def test_two_ranks_save_and_three_load(url: str, options: dict[str, Any]) -> None:
    """12 MiB a rank, in parts; retention leaves the last two."""
    numpy = CpuAccelerator("numpy")
    for step in (1, 2, 3):
        run_threads(2, save, url, options, step, accelerator=numpy)
    assert run_threads(3, load, url, options, accelerator=numpy) == [0.0, 0.0, 0.0]
    storage = FsspecStorage(url, options)
    assert [(status.tag, status.problem) for status in list_checkpoints(storage)] == [("step3", ""), ("step2", "")]
    assert storage.names() == ("latest", "step2", "step3")
    assert _uploads(options) == []


def test_another_process_loads_what_this_one_saved(url: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Nothing is remembered: each finds what the other wrote last."""
    storage = FsspecStorage(url, options)
    assert storage.names() == ()
    script = tmp_path / "write.py"
    script.write_text(KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "return"))
    subprocess.run([sys.executable, script, url, options["endpoint_url"], "t/rank"], timeout=120, check=True)
    assert (storage.names(), storage.names("t"), storage.size("t/rank")) == (("t",), ("rank",), 30 * _MIB)


@pytest.mark.parametrize(
    ("location", "changed", "hint"),
    [
        ("s3://no-such-bucket/runs", {}, "make the bucket first"),
        (
            "s3://bucket/runs",
            {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 0}}},
            "earlier checkpoints are intact",
        ),
        ("s3://bucket/runs", {"no_such_option": 1}, "check the options"),
    ],
    ids=["bucket", "server", "option"],
)
def test_what_is_wrong_is_named_with_its_cure(
    options: dict[str, Any], location: str, changed: dict[str, Any], hint: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        FsspecStorage(location, {**options, **changed}).write("latest", [b"x"])
    assert caught.value.value == "latest"
    assert f"{location}/latest" in str(caught.value)
    assert hint in caught.value.hint
