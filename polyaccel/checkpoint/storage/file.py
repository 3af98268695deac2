"""`FileStorage`, a directory on a local or network filesystem, and `as_storage`, which makes one of a path."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from polyaccel.accelerators.base import Probe
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.checkpoint.storage.owner import ProcessIdentity
from polyaccel.errors import CheckpointError

_UNFINISHED = ".tmp"
_writes = count()
"""Numbers of the writes of this process, which make their temporary names unique."""
_URL = re.compile(r"[a-z][a-z0-9+.-]+://")
_WRITEBACK_NBYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_DIRECTORY_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EISDIR)


class FileStorage(Storage):
    """A directory on a local or network filesystem.

    [Note: Durable replacement]
    A file is written under a temporary name in its own directory, flushed, and fsynced *before* os.replace, else the
    new name can outlive its contents; the directory is fsynced after it, else the new name itself can be lost. Nothing
    is ever removed to make room for its successor. A temporary name is unique, for several jobs may write one file. It
    contains the process that writes, so that `clear_unfinished` recognises writes that no process will finish.

    Args:
        location: The directory, which may not exist yet. A relative one is resolved at once: the program may change its
            working directory.
        options: There are none.

    Raises:
        CheckpointError: The location is a URL.
    """

    name = "file"
    is_cached = True

    def __init__(self, location: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> None:
        super().__init__(location, options)
        if _URL.match(self.location):
            raise CheckpointError(
                f"{self.location!r} is a URL, and the storage {self.name!r} would make a folder of that name",
                hint='name another storage for it in the config, such as "checkpoint": {"storage": "fsspec"}',
                value=self.location,
            )
        # The program may change its working directory later, and the process that writes has another one.
        self.location = os.path.abspath(self.location)

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True, reason="a directory")

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        target = self._resolve(path)
        temporary = target.with_name(f".{target.name}.{ProcessIdentity.me().token}-{next(_writes)}{_UNFINISHED}")
        with self._explain(path, "write"):
            try:
                with self._open_new(temporary) as file:
                    begun = 0
                    for chunk in chunks:
                        file.write(chunk)
                        begun = _begin_writeback(file, begun)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, target)
            except BaseException:
                temporary.unlink(missing_ok=True)  # on a full disk, the room is needed
                raise
            with suppress(FileNotFoundError):  # who waited for the file has already removed it with its directory
                _fsync_directory(target.parent)

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        with self._explain(path, "read"), open(self._resolve(path), "rb") as file:
            file.seek(offset)
            data = file.read(nbytes)
        self._require(path, offset, nbytes, len(data))
        return data

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        if type(self).read is not FileStorage.read:  # a storage that derives from this one reads its own way
            super().read_into(path, offset, target)
            return
        reached = 0
        with self._explain(path, "read"), open(self._resolve(path), "rb", buffering=0) as file:
            file.seek(offset)
            while reached < target.nbytes and (count := file.readinto(target[reached:])):
                reached += count
        self._require(path, offset, target.nbytes, reached)

    def _require(self, path: str, offset: int, nbytes: int, found_nbytes: int) -> None:
        """Raise CheckpointError where fewer than `nbytes` bytes were found."""
        if found_nbytes != nbytes:
            raise CheckpointError(
                f"{self._show(path)} ends at byte {offset + found_nbytes}, {nbytes - found_nbytes} bytes too early",
                hint="the file was truncated: load another tag",
                value=path,
            )

    def size(self, path: str) -> int | None:
        target = self._resolve(path)
        with self._explain(path, "look at"):
            return target.stat().st_size if target.is_file() else None

    def names(self, path: str = "") -> tuple[str, ...]:
        target = self._resolve(path)
        with self._explain(path, "list"):
            try:
                return tuple(sorted(name for name in os.listdir(target) if not name.startswith(".")))
            except FileNotFoundError:
                return ()

    def delete_tree(self, path: str) -> None:
        target = self._resolve(path)
        with self._explain(path, "delete"):
            try:
                shutil.rmtree(target)
            except FileNotFoundError:
                return
            _fsync_directory(target.parent)

    def delete(self, path: str) -> None:
        target = self._resolve(path)
        with self._explain(path, "delete"), suppress(FileNotFoundError):
            target.unlink()
            _fsync_directory(target.parent)

    def clear_unfinished(self, path: str = "", *, if_empty: bool = False) -> None:
        folder = self._resolve(path)
        with self._explain(path, "clear"), suppress(FileNotFoundError):
            for name in os.listdir(folder):
                if name.startswith(".") and name.endswith(_UNFINISHED):
                    owner, place = ProcessIdentity.in_name(name), folder / name
                    with suppress(FileNotFoundError):  # it was finished just now
                        if owner is None or not owner.is_alive(age_s=time.time() - place.stat().st_mtime):
                            place.unlink()
            if if_empty and not os.listdir(folder):
                with suppress(OSError):  # another process has just begun to use it
                    folder.rmdir()

    def check_space(self, nbytes: int) -> None:
        place = Path(self.location).absolute()
        while not place.exists():
            place = place.parent
        with self._explain("", "look at"):
            free_nbytes = shutil.disk_usage(place).free
        if nbytes > free_nbytes:
            raise CheckpointError(
                f"the checkpoint needs {nbytes:,} bytes, but {self.location} has {free_nbytes:,} left",
                hint="free some space or save elsewhere; nothing was written and earlier checkpoints are intact",
                value=nbytes,
            )

    def _open_new(self, path: Path) -> BinaryIO:
        """Open a new file, in a directory that is made if it has to be."""
        for _ in range(8):
            with suppress(FileNotFoundError):  # another job has just cleared the directory away, which was empty
                self._make_directory(path.parent)
                return open(path, "xb")
        return open(path, "xb")

    def _make_directory(self, directory: Path) -> None:
        """Create a directory with its parents, durably. Other ranks may be doing the same at the same moment."""
        if directory.is_dir():
            return
        if directory.parent != directory:
            self._make_directory(directory.parent)
        try:
            os.mkdir(directory)
        except FileExistsError:
            return  # another rank was faster, which is_dir may not see yet on NFS; if it is a file, opening will say so
        _fsync_directory(directory.parent)

    def _resolve(self, path: str) -> Path:
        return Path(self.location, *self._parts(path))

    def _cure(self, error: Any, verb: str) -> str:
        if error.errno in _FULL:
            return "the disk or quota is full: free some space; earlier checkpoints are intact"
        return "check that the directory exists on every host and that you may use it"


def as_storage(place: Storage | str | os.PathLike[str]) -> Storage:
    """Return a storage for a place.

    Args:
        place: A storage, or a directory.

    Returns:
        `place` itself if it is a storage, else a `FileStorage` of the directory.
    """
    return place if isinstance(place, Storage) else FileStorage(place)


def _begin_writeback(file: BinaryIO, begun: int) -> int:
    """Start the writeback from byte `begun` if worth a call; return how far. The later fsync waits less."""
    end = file.tell()
    if end - begun < _WRITEBACK_NBYTES:
        return begun
    file.flush()
    sync_file_range = _sync_file_range()
    if sync_file_range is not None:
        sync_file_range(file.fileno(), begun, end - begun, _SYNC_FILE_RANGE_WRITE)  # a hint, whatever it returns
    return end


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The system call of Linux by that name; None elsewhere."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    found: Callable[[int, int, int, int], int] | None = function
    return found


def _fsync_directory(directory: Path) -> None:
    """Make the names in a directory durable, on systems where a directory can be synced."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError as error:
        if error.errno in _NO_DIRECTORY_FSYNC:
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_FSYNC:
            raise
    finally:
        os.close(descriptor)
