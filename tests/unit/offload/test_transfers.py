"""Transfers of files in the background, by threads of csrc/ and of Python alike."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import InvariantError
from polyaccel.offload.nvme import NvmeTier
from polyaccel.offload.transfers import NativeTransfers, PythonTransfers, Transfers, describe_transfers, open_transfers
from polyaccel.ops.native import Native, native

HOST = CpuAccelerator("numpy")
THREADS = 2


def native_threads() -> NativeTransfers:
    library = native().library
    if library is None:
        pytest.skip(native().reason)
    return NativeTransfers(library, THREADS)


@pytest.fixture(params=["csrc", "python"])
def transfers(request: pytest.FixtureRequest) -> Iterator[Transfers]:
    made = native_threads() if request.param == "csrc" else PythonTransfers(THREADS)
    yield made
    made.close()


def memory(data: bytes) -> Buffer:
    buffer = HOST.allocate(len(data), DType.UINT8)
    buffer.from_bytes(data)
    return buffer


def test_bytes_go_to_their_offset_and_come_back(transfers: Transfers, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    assert transfers.start(path, 3, memory(b"abc"), writes=True).wait() is None
    assert path.read_bytes() == b"012abc6789"
    target = memory(bytes(4))
    transfer = transfers.start(path, 5, target, writes=False)
    assert transfer.wait() is None
    assert transfer.is_done
    assert transfer.wait() is None
    assert target.to_bytes() == b"c678"


def test_a_transfer_waits_for_nobody_but_its_own_file(transfers: Transfers, tmp_path: Path) -> None:
    """Opening a pipe lasts until its other end is opened, so that transfer is under way as long as we like."""
    pipe, path = tmp_path / "pipe", tmp_path / "a"
    os.mkfifo(pipe)
    path.write_bytes(b"abc")
    slow = transfers.start(pipe, 0, memory(bytes(3)), writes=False)
    target = memory(bytes(3))
    assert transfers.start(path, 0, target, writes=False).wait() is None
    assert target.to_bytes() == b"abc"
    assert not slow.is_done
    os.close(os.open(pipe, os.O_WRONLY))
    error = slow.wait()
    assert error is not None
    assert error.errno == errno.ESPIPE


def test_all_of_many_transfers_are_done_when_it_is_closed(transfers: Transfers, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    asked = [transfers.start(path, index, memory(bytes([index])), writes=True) for index in range(100)]
    transfers.close()
    transfers.close()
    assert path.read_bytes() == bytes(range(100))
    assert all(transfer.is_done and transfer.wait() is None for transfer in asked)


def test_errors_are_those_of_the_system(transfers: Transfers, tmp_path: Path) -> None:
    for path, code in ((tmp_path / "none", errno.ENOENT), (Path("/dev/full"), errno.ENOSPC)):
        error = transfers.start(path, 0, memory(b"abc"), writes=True).wait()
        assert error is not None
        assert error.errno == code
        assert os.strerror(code) in str(error)


def test_the_end_of_a_file_is_an_error_that_says_where(transfers: Transfers, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    error = transfers.start(path, 6, memory(bytes(7)), writes=False).wait()
    assert error is not None
    assert error.errno == errno.EIO
    assert "it ends after 10 bytes, 3 more were expected" in str(error)


def test_memory_lives_as_long_as_the_transfer(transfers: Transfers, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = tmp_path / "a"
    path.write_bytes(bytes(1 << 20))
    blockers = [transfers.start(pipe, 0, memory(bytes(1)), writes=False) for _ in range(THREADS)]
    transfers.start(path, 0, memory(b"x" * (1 << 20)), writes=True)  # behind those; nobody holds it or its memory
    for _ in range(20):
        memory(b"y" * (1 << 20))
    ends = os.open(pipe, os.O_RDWR)
    for blocker in blockers:
        blocker.wait()
    transfers.close()
    os.close(ends)
    assert path.read_bytes() == b"x" * (1 << 20)


def test_closed_native_threads_are_not_used_again(tmp_path: Path) -> None:
    transfers = native_threads()
    transfers.close()
    with pytest.raises(InvariantError):
        transfers.start(tmp_path / "a", 0, memory(b"abc"), writes=True)


def test_python_serves_where_nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, kind, name in ((native(), NativeTransfers, "csrc"), (Native(None, "none"), PythonTransfers, "Python")):
        if found.library is None and kind is NativeTransfers:
            continue
        monkeypatch.setattr("polyaccel.offload.transfers.native", lambda found=found: found)
        transfers = open_transfers(1)
        assert type(transfers) is kind
        assert name in describe_transfers()
        assert name in NvmeTier.probe().reason
        transfers.close()
