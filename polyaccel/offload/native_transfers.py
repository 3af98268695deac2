"""Transfers by the threads of csrc/files, which need neither Python's lock nor its attention."""

from __future__ import annotations

import ctypes
import errno
import os
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path

from polyaccel.core.buffer import Buffer
from polyaccel.errors import InvariantError, OffloadError
from polyaccel.offload.transfers import PythonTransfers, Transfer, Transfers, cut_short
from polyaccel.ops.native import native

_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "pa_files_open": (c_void_p, (c_int32,)),
    "pa_files_close": (None, (c_void_p,)),
    "pa_files_start": (c_int64, (c_void_p, c_int32, c_char_p, c_int64, c_void_p, c_int64)),
    "pa_files_is_done": (c_int32, (c_void_p, c_int64)),
    "pa_files_wait": (c_int64, (c_void_p, c_int64)),
}


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
        """The threads' handle, a `pa_files`. Raises InvariantError once they have ended, and in a forked child, which
        has none."""
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
