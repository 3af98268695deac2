"""The contract of a storage plugin, `Storage`, and `FileStorage`, a directory.

The contract is small because the format of a checkpoint (what is complete, what may be deleted) needs only this: a file
appears whole or not at all, and it stays once `write` has returned. There is no rename: a pointer moves by writing its
file again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar

from polyaccel.accelerators.base import Probe
from polyaccel.checkpoint.storage.owner import ProcessIdentity
from polyaccel.errors import CheckpointError, ConfigError, Problem
from polyaccel.registry import PluginGroup, load_plugin

_UNFINISHED = ".tmp"
_writes = count()
"""Numbers of the writes of this process, which make their temporary names unique."""
_URL = re.compile(r"[a-z][a-z0-9+.-]+://")
_WRITEBACK_NBYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_DIRECTORY_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EISDIR)


class Storage(ABC):
    """A place for files, of all ranks or of one host's. A file has one writer at a time; many may read.

    Every method raises CheckpointError, naming the file, when the place fails or refuses. Paths are relative to the
    place, with "/" between folders. One that leads out of it is refused.

    Args:
        location: The place: a directory, URL or name, as the plugin defines it.
        options: Options of `checkpoint.storage` in the config, which `check_options` turns into `self.options`.

    Raises:
        ConfigError: The options are refused.
    """

    API_VERSION: ClassVar[tuple[int, int]] = (2, 0)
    name: ClassVar[str]
    is_shared: ClassVar[bool] = True
    """Whether all ranks read the same files. False: only those of one host do, such as on a local disk."""
    is_cached: ClassVar[bool] = False
    """Whether the system caches what was just read. A load then verifies first and reads again, instead of keeping
    everything that it has verified."""
    _failures: ClassVar[type[Exception]] = OSError

    def __init__(self, location: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> None:
        self.location = os.fspath(location)
        self.options = self.check_options(options or {})

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> Any:
        """Parse the options of the plugin, without opening anything. The default refuses every option.

        Args:
            options: Options by name, as the user wrote them.

        Returns:
            Value of `self.options`: a plugin's own model of its options.

        Raises:
            ConfigError: An option is unknown or invalid. Keys begin with `name`.
        """
        if options:
            raise ConfigError(
                [
                    Problem(f"{cls.name}.{key}", value, "is not an option of this storage")
                    for key, value in options.items()
                ]
            )
        return None

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Return whether this kind of storage could be used here. Opens and connects nothing."""

    @abstractmethod
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Create or replace a file, with the folders that it needs.

        Atomic: until the call returns, readers find the former contents, or no file if there was none, also after a
        crash. Durable: once it has returned, the file survives a power cut. Memory is bounded by the largest chunk.

        Args:
            path: File to write.
            chunks: Contents in order. Views of memory stay unchanged until the call returns. Exceptions of the
                iterable are passed on, and the former file stays.

        Raises:
            CheckpointError: The file cannot be written.
        """

    @abstractmethod
    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Read a part of a file.

        Args:
            path: File to read.
            offset: First byte.
            nbytes: Bytes to read.

        Returns:
            Exactly `nbytes` bytes.

        Raises:
            CheckpointError: There is no such file, or it ends before.
        """

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Read a part of a file into memory. The default uses `read`.

        Args:
            path: File to read.
            offset: First byte.
            target: Bytes to fill, all of them.

        Raises:
            CheckpointError: There is no such file, or it ends before.
        """
        target[:] = self.read(path, offset, target.nbytes)

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Return the length of a file.

        Args:
            path: File to look at.

        Returns:
            Bytes; None if there is no file (a folder is not one).
        """

    @abstractmethod
    def names(self, path: str = "") -> tuple[str, ...]:
        """List a folder.

        Args:
            path: The folder; "" for the place itself.

        Returns:
            Sorted names of files and folders directly in it, without unfinished writes. Empty if it does not exist.
        """

    @abstractmethod
    def delete_tree(self, path: str) -> None:
        """Remove a folder with everything in it. Does nothing if it does not exist.

        Args:
            path: The folder.
        """

    def delete(self, path: str) -> None:
        """Remove a file. Once the call has returned, no reader finds it, also after a power cut. Does nothing if it
        does not exist.

        The default serves storages whose `delete_tree` removes a file too.

        Args:
            path: The file.
        """
        self.delete_tree(path)

    def clear_unfinished(self, path: str = "", *, if_empty: bool = False) -> None:  # noqa: B027 - few leave any
        """Remove unfinished writes of killed processes directly in a folder. Those of living processes stay.

        Args:
            path: The folder; "" for the place itself.
            if_empty: Also remove the folder if it is then empty and this storage has empty folders.
        """

    def check_space(self, nbytes: int) -> None:  # noqa: B027 - most remote storages cannot tell
        """Refuse a write that certainly does not fit.

        Args:
            nbytes: Bytes that will be added.

        Raises:
            CheckpointError: There is less room.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location!r})"

    def _show(self, path: str) -> str:
        return f"{self.location.rstrip('/')}/{path}" if path else self.location

    def _parts(self, path: str) -> tuple[str, ...]:
        """Return the folders and the name of `path`. Raises CheckpointError for one that leads out of the location."""
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts:
            hint = "the checkpoint is damaged or forged"
            raise CheckpointError(f"{path!r} leads out of {self.location}", hint=hint, value=path)
        return parts.parts

    @contextmanager
    def _explain(self, path: str, verb: str) -> Iterator[None]:
        """Turn the `_failures` of the place into CheckpointErrors, each with the hint of `_cure`."""
        try:
            yield
        except CheckpointError:
            raise
        except self._failures as error:
            cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
            hint = self._cure(error, verb)
            raise CheckpointError(f"cannot {verb} {self._show(path)}: {cause}", hint=hint, value=path) from error

    def _cure(self, error: Any, verb: str) -> str:
        return ""


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


def open_storage(name: str, location: str, options: Mapping[str, Any]) -> Storage:
    """Make the storage of a plugin.

    Args:
        name: Name of the plugin.
        location: The place.
        options: Options of the plugin; without any the plugin is constructed with the location alone.

    Returns:
        The storage.

    Raises:
        PluginNotFound: There is no such plugin.
        PluginContractError: It cannot be loaded, or does not implement the contract.
        ConfigError: The plugin refuses the options.
    """
    plugin = load_plugin(PluginGroup.STORAGE, name, Storage, Storage.API_VERSION)
    storage = plugin(location, options) if options else plugin(location)
    assert isinstance(storage, Storage)  # what loading checked
    return storage


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
