"""The file in which a buffer's contents rest, read and written in pieces or whole.

[Note: Page cache]
Files are read and written through the system's page cache, by plain calls that let other threads run. With
memory to spare the cache makes offload nearly as fast as the host tier; under pressure the system writes back and
forgets, so states may be larger than memory. Direct access would bypass the cache on machines that can spare it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from polyaccel.core.buffer import Buffer
from polyaccel.errors import OffloadError
from polyaccel.offload.transfers import Transfer, Transfers, memory_of, read_all, write_all

BLOCK_NBYTES = 4096
"""Files and whole transfers are multiples of this, so that no transfer of a whole file reads before it writes."""


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to whole blocks."""
    return -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES


class Access:
    """A read or write of a `StateFile`, under way or done. `conclude` turns a transfer's error into the one that users
    see."""

    def __init__(self, transfer: Transfer | None, conclude: Callable[[OSError | None], OffloadError | None]) -> None:
        self._transfer = transfer
        self._conclude = conclude

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._transfer is None or self._transfer.is_done

    def wait(self) -> OffloadError | None:
        """Wait until it is done; the error that ended it, if one did."""
        return self._conclude(None if self._transfer is None else self._transfer.wait())

    def finish(self) -> None:
        """`wait`, and raise its error."""
        error = self.wait()
        if error is not None:
            raise error


class StateFile:
    """A file of `nbytes` at `path`, made by `create`. Opened again for each access, so that it holds no descriptor."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._unwritten: Buffer | None = None
        """The contents, when the file could not take them: they are kept in memory until it does."""

    def create(self) -> None:
        """Reserve the file's room on the disk, all zeros. Raises OffloadError when there is too little."""
        free = _free_nbytes(self.path.parent)
        if free < padded(self.nbytes):
            raise _full(self.path, self.nbytes, free)
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _reserve(file, padded(self.nbytes))
            finally:
                os.close(file)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise self._failure("reserved", error) from error

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Bytes [offset, offset + nbytes)."""
        data = bytearray(nbytes)
        if self._unwritten is not None:
            data[:] = memory_of(self._unwritten)[offset : offset + nbytes]
        else:
            self._access(os.O_RDONLY, "read", lambda file: read_all(file, memoryview(data), offset))
        return data

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Overwrite from `offset` on. Raises OffloadError; the bytes there are then undefined."""
        view = memoryview(data).cast("B")
        if self._unwritten is not None:
            memory_of(self._unwritten)[offset : offset + view.nbytes] = view
        else:
            self._access(os.O_WRONLY, "written", lambda file: write_all(file, view, offset))

    def start_reading(self, transfers: Transfers, target: Buffer, offset: int = 0) -> Access:
        """Fill `target`, which is in host memory, with the bytes from `offset` on."""
        if self._unwritten is not None:
            memory_of(target)[:] = memory_of(self._unwritten)[offset : offset + target.nbytes]
            return Access(None, lambda error: None)
        return self._start(transfers, target, offset, writes=False)

    def start_writing(self, transfers: Transfers, source: Buffer) -> Access:
        """Write all of the file from `source`, which has `padded(nbytes)` bytes. If that fails, call `keep`."""
        return self._start(transfers, source, 0, writes=True)

    def _start(self, transfers: Transfers, memory: Buffer, offset: int, *, writes: bool) -> Access:
        def conclude(error: OSError | None) -> OffloadError | None:
            if error is not None:
                return self._failure("written" if writes else "read", error)
            if writes:
                self._unwritten = None
            return None

        try:
            return Access(transfers.start(self.path, offset, memory, writes=writes), conclude)
        except OSError as error:
            refused = error
        return Access(None, lambda _: conclude(refused))

    def keep(self, source: Buffer) -> None:
        """Let `source`, which could not be written, be the contents from now on, until it can be."""
        self._unwritten = source

    def _access(self, flags: int, verb: str, act: Callable[[int], None]) -> None:
        try:
            file = os.open(self.path, flags | os.O_CLOEXEC)
            try:
                act(file)
            finally:
                os.close(file)
        except OSError as error:
            raise self._failure(verb, error) from error

    def _failure(self, verb: str, error: OSError) -> OffloadError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return _full(self.path, self.nbytes, _free_nbytes(self.path.parent))
        hint = "check the disk; continue from a checkpoint if it cannot be repaired"
        return OffloadError(f"{self.path} could not be {verb}: {error}", hint=hint, value=str(self.path))


def _reserve(file: int, nbytes: int) -> None:
    """Give the file `nbytes` of disk that no other file can take, where the file system can; zeros in any case."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, nbytes)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(file, nbytes)


def _free_nbytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _full(path: Path, nbytes: int, free: int) -> OffloadError:
    return OffloadError(
        f"the disk is full: {path} needs {nbytes} bytes, {free} are free",
        hint="make room, let nvme_path name a larger disk, or offload less (ratio)",
        value=nbytes,
    )
