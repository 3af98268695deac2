"""The contract of a storage plugin, `Storage`.

The contract is small because the format of a checkpoint (what is complete, what may be deleted) needs only this: a file
appears whole or not at all, and it stays once `write` has returned. There is no rename: a pointer moves by writing its
file again.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, ClassVar

from polyaccel.accelerators.base import Probe
from polyaccel.errors import CheckpointError, ConfigError, Problem
from polyaccel.registry import PluginGroup, load_plugin


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
