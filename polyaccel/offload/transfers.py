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
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path

from polyaccel.core.buffer import Buffer
from polyaccel.errors import InvariantError, OffloadError
from polyaccel.ops.native import native

_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "pa_files_open": (c_void_p, (c_int32,)),
    "pa_files_close": (None, (c_void_p,)),
    "pa_files_start": (c_int64, (c_void_p, c_int32, c_char_p, c_int64, c_void_p, c_int64)),
    "pa_files_is_done": (c_int32, (c_void_p, c_int64)),
    "pa_files_wait": (c_int64, (c_void_p, c_int64)),
}


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
        """Fill `memory` (host) from the file at `offset`, or write it; the transfer holds it until done."""

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


class NativeTransfers(Transfers):
    """Transfers by threads of `library`, compiled from csrc/files. Raises OffloadError when none can be started."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.library = library
        self._pid = os.getpid()
        self._under_way: dict[int, _NativeTransfer] = {}
        """By handle. Keeps the memory alive that threads write into, where nothing else holds it any more."""
        self._files: int | None = library.pa_files_open(threads)
        if self._files is None:
            raise OffloadError("no thread can be started to read and write files", hint="raise the limit: ulimit -u")

    @property
    def files(self) -> int:
        """Return the threads' handle `pa_files`. Raises InvariantError after their end and in forks."""
        if self._files is None or self._pid != os.getpid():
            raise InvariantError("files were used after their threads had ended")
        return self._files

    def start(self, path: Path, offset: int, memory: Buffer, *, writes: bool) -> Transfer:
        where = (os.fsencode(path), offset, memory.data_ptr(), memory.nbytes)
        handle = self.library.pa_files_start(self.files, writes, *where)
        if not handle:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        transfer = self._under_way[handle] = _NativeTransfer(self, handle, offset, memory, writes)
        return transfer

    def forget(self, handle: int) -> None:
        """Release the memory of a transfer that is done."""
        del self._under_way[handle]

    def close(self) -> None:
        if self._files is None or self._pid != os.getpid():
            return
        for transfer in list(self._under_way.values()):
            transfer.wait()
        self.library.pa_files_close(self._files)
        self._files = None


class _NativeTransfer(Transfer):
    def __init__(self, owner: NativeTransfers, handle: int, offset: int, memory: Buffer, writes: bool) -> None:
        self._owner = owner
        self._handle = handle
        self._offset, self._writes = offset, writes
        self._nbytes = memory.nbytes
        self._memory: Buffer | None = memory
        """None once the transfer is done."""
        self._error: OSError | None = None

    @property
    def is_done(self) -> bool:
        return self._memory is None or bool(self._owner.library.pa_files_is_done(self._owner.files, self._handle))

    def wait(self) -> OSError | None:
        if self._memory is not None:
            outcome = self._owner.library.pa_files_wait(self._owner.files, self._handle)
            self._owner.forget(self._handle)
            self._memory = None
            if outcome < 0:
                self._error = OSError(-outcome, os.strerror(-outcome))
            elif outcome < self._nbytes:
                self._error = cut_short(self._offset, outcome, self._nbytes, writes=self._writes)
        return self._error


def open_transfers(threads: int) -> Transfers:
    """Threads of csrc/ where it was compiled, else of Python. Raises OffloadError."""
    library = _library()
    return PythonTransfers(threads) if library is None else NativeTransfers(library, threads)


def describe_transfers() -> str:
    """The kind of threads, in words."""
    return "Python's threads" if _library() is None else "threads of csrc/"


def _library() -> ctypes.CDLL | None:
    library = native().library
    return library if hasattr(library, "pa_files_open") else None
