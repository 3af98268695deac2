"""A storage in the memory of this process."""

from __future__ import annotations

from collections.abc import Iterable

from polyaccel.checkpoint.storage.base import Storage
from polyaccel.core.types import Probe
from polyaccel.errors import CheckpointError


class MemoryStorage(Storage):
    """Files in the memory of this process: those of a checkpoint that is made to be read at once."""

    name = "memory"
    is_cached = True

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._files: dict[str, bytearray] = {}

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True, reason="the memory of this process")

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        whole = bytearray()
        for chunk in chunks:
            whole += chunk
        self._files[self._key(path)] = whole

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        found = self._files.get(self._key(path))
        if found is None:
            raise CheckpointError(f"there is no {path} in {self.location}", value=path)
        if offset + nbytes > len(found):
            raise CheckpointError(f"{path} in {self.location} ends before byte {offset + nbytes}", value=path)
        return bytes(memoryview(found)[offset : offset + nbytes])

    def size(self, path: str) -> int | None:
        found = self._files.get(self._key(path))
        return None if found is None else len(found)

    def names(self, path: str = "") -> tuple[str, ...]:
        folder = f"{self._key(path)}/" if path else ""
        inside = (key[len(folder) :] for key in self._files if key.startswith(folder))
        return tuple(sorted({key.partition("/")[0] for key in inside}))

    def delete_tree(self, path: str) -> None:
        key = self._key(path)
        for each in [each for each in self._files if each == key or each.startswith(f"{key}/" if key else "")]:
            del self._files[each]

    def _key(self, path: str) -> str:
        return "/".join(self._parts(path))
