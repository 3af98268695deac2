"""Reads and writes of files in the background: asked for in order, under way side by side, waited for one by one.

The threads are those of csrc/files where it was compiled, and Python's where it was not. Both open a file again for
each transfer, so that no descriptor is held, and continue after short transfers and interruptions.
"""

from __future__ import annotations

import ctypes
import errno
import os
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from polyaccel.core.buffer import Buffer


class Transfer(ABC):
    """One read or write, under way or done."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def wait(self) -> OSError | None:
        """Wait until it is done; the error that ended it, if one did. May be called again."""


class Transfers(ABC):
    """Threads that read and write files. Used from one thread at a time."""

    @abstractmethod
    def start(self, path: Path, offset: int, memory: Buffer, *, writes: bool) -> Transfer:
        """Fill `memory`, which is in host memory, with the bytes of the file from `offset` on; or write it there.

        `memory` is kept alive, and is the transfer's until it is done. Raises OSError when it cannot be asked for.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for everything under way, and end the threads. May be called again."""


class PythonTransfers(Transfers):
    """Transfers by threads of Python, which block no other thread while the system reads and writes."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="polyaccel-files")

    def start(self, path: Path, offset: int, memory: Buffer, *, writes: bool) -> Transfer:
        return _PythonTransfer(self._threads.submit(_transfer, path, offset, memory, writes))

    def close(self) -> None:
        self._threads.shutdown(wait=True)


class _PythonTransfer(Transfer):
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def wait(self) -> OSError | None:
        error = self._future.exception()
        if error is None or isinstance(error, OSError):
            return error
        raise error


def _transfer(path: Path, offset: int, memory: Buffer, writes: bool) -> None:
    file = os.open(path, (os.O_WRONLY if writes else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        (write_all if writes else read_all)(file, memory_of(memory), offset)
    finally:
        os.close(file)


def read_all(file: int, target: memoryview, offset: int) -> None:
    """Fill `target` from `offset` on. Raises OSError, also when the file ends before that."""
    done = 0
    while done < target.nbytes:
        count = os.preadv(file, [target[done:]], offset + done)
        if count == 0:
            raise cut_short(offset, done, target.nbytes, writes=False)
        done += count


def write_all(file: int, source: memoryview, offset: int) -> None:
    """Write `source` from `offset` on. Raises OSError."""
    done = 0
    while done < source.nbytes:
        count = os.pwritev(file, [source[done:]], offset + done)
        if count == 0:
            raise cut_short(offset, done, source.nbytes, writes=True)
        done += count


def cut_short(offset: int, done: int, nbytes: int, *, writes: bool) -> OSError:
    """The error of a transfer of `nbytes` from `offset` on that the system ended after `done` bytes without one."""
    left = nbytes - done
    what = f"it took no more than {done} bytes of {nbytes}" if writes else ""
    return OSError(errno.EIO, what or f"it ends after {offset + done} bytes, {left} more were expected")


def memory_of(buffer: Buffer) -> memoryview:
    """The bytes of a buffer, which is in host memory, to read and write. Valid as long as the buffer."""
    return memoryview((ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr())).cast("B")
