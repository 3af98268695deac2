"""A storage in a keeper's memory, so that what it holds is a checkpoint like any other."""

from __future__ import annotations

import os
from collections.abc import Iterable
from weakref import finalize

from polyaccel.checkpoint.storage.base import Storage
from polyaccel.core.types import Probe
from polyaccel.errors import CheckpointError
from polyaccel.job.memory_server.client import KeeperClient
from polyaccel.job.memory_server.protocol import seal_length
from polyaccel.job.memory_server.start import can_keep

_NAME = "polyaccel-replica"


class KeptStorage(Storage):
    """The files below `folder` of what a keeper keeps. Durable as long as the keeper lives.

    A file that has been read stays open, and so does its memory, until the storage is closed or forgotten.
    """

    name = "keeper"

    def __init__(self, client: KeeperClient, folder: str) -> None:
        super().__init__(f"memory:{folder}")
        self._client = client
        self._folder = folder
        self._open: dict[str, int] = {}
        self._close = finalize(self, _close_all, self._open)

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=can_keep(), reason="the memory of a keeper, on Linux")

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        memory = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with self._explain(path, "write"):
                for chunk in chunks:
                    view = memoryview(chunk)
                    while view:
                        view = view[os.write(memory, view) :]
                seal_length(memory)
                self._client.put(self._key(path), memory=memory)
        finally:
            os.close(memory)
        self._forget(self._key(path))

    def link(self, path: str, memory: int) -> None:
        """Let memory without a name, whose length is sealed, be the contents of a file."""
        self._client.put(self._key(path), memory=memory)
        self._forget(self._key(path))

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        key, parts, left = self._key(path), [], nbytes
        if key not in self._open:
            kept = self._client.get(key)
            if kept is None or kept.memory is None:
                raise CheckpointError(f"there is no {path} in {self.location}", value=path)
            self._open[key] = kept.memory
        while left and (part := os.pread(self._open[key], left, offset + nbytes - left)):
            parts.append(part)
            left -= len(part)
        if left:
            raise CheckpointError(f"{path} in {self.location} ends {left} bytes too early", value=path)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def size(self, path: str) -> int | None:
        return self._client.names(self._key(path)).get(self._key(path))

    def names(self, path: str = "") -> tuple[str, ...]:
        folder = f"{self._key(path)}/"
        return tuple(sorted({key[len(folder) :].partition("/")[0] for key in self._client.names(folder)}))

    def delete_tree(self, path: str) -> None:
        self._client.drop(f"{self._key(path)}/")
        self._forget(f"{self._key(path)}/")

    def delete(self, path: str) -> None:
        self._client.drop(self._key(path))
        self._forget(self._key(path))

    def close(self) -> None:
        """Release files that were read. What is kept stays."""
        self._close()

    def _forget(self, key: str) -> None:
        """Release a file, or those below a folder, which may be other ones now."""
        for each in [each for each in self._open if each == key or (key.endswith("/") and each.startswith(key))]:
            os.close(self._open.pop(each))

    def _key(self, path: str) -> str:
        return "/".join([self._folder, *self._parts(path)])


class ApartStorage(KeptStorage):
    """The same in the keepers of several hosts: each has the parts of its ranks and of its neighbour's."""

    is_shared = False


def _close_all(files: dict[str, int]) -> None:
    while files:
        os.close(files.popitem()[1])
