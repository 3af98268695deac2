"""A storage whose every call ends within a limit: a call to a hung file system cannot be interrupted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from threading import Thread
from typing import TypeVar

from polyaccel.accelerators.base import Probe
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.errors import CheckpointError

T = TypeVar("T")
_LOGGED_AFTER_S = 30.0
_log = logging.getLogger(__name__)


class LimitedStorage(Storage):
    """`storage`, whose calls fail after `limit_s` seconds each, and at once while an earlier call has no answer.

    A call runs in a daemon thread, which is left behind when it exceeds the limit. A generator given to `write` runs
    there too, so it must not use what belongs to the caller's thread.
    """

    name = "limited"

    def __init__(self, storage: Storage, limit_s: float) -> None:
        self.location, self.options = storage.location, storage.options
        self._storage, self._limit_s = storage, limit_s
        self._late: Thread | None = None

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True, reason="a limit around another storage")

    @property
    def is_hung(self) -> bool:
        """Whether a call exceeded the limit and has not returned since."""
        return self._late is not None and self._late.is_alive()

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        self._limited("write", path, lambda: self._storage.write(path, chunks))

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        return self._limited("read", path, lambda: self._storage.read(path, offset, nbytes))

    def size(self, path: str) -> int | None:
        return self._limited("find", path, lambda: self._storage.size(path))

    def names(self, path: str = "") -> tuple[str, ...]:
        return self._limited("list", path, lambda: self._storage.names(path))

    def delete_tree(self, path: str) -> None:
        self._limited("delete", path, lambda: self._storage.delete_tree(path))

    def delete(self, path: str) -> None:
        self._limited("delete", path, lambda: self._storage.delete(path))

    def clear_unfinished(self, path: str = "", *, if_empty: bool = False) -> None:
        self._limited("clear", path, lambda: self._storage.clear_unfinished(path, if_empty=if_empty))

    def check_space(self, nbytes: int) -> None:
        self._limited("find room in", "", lambda: self._storage.check_space(nbytes))

    def _limited(self, verb: str, path: str, call: Callable[[], T]) -> T:
        if self.is_hung:
            raise self._hung(verb, path, "an earlier call has no answer yet")
        results, failures = list[T](), list[BaseException]()

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:
                failures.append(error)

        thread = Thread(target=run, name=f"storage-{verb}", daemon=True)
        thread.start()
        thread.join(min(_LOGGED_AFTER_S, self._limit_s))
        if thread.is_alive() and self._limit_s > _LOGGED_AFTER_S:
            _log.warning(
                "the training has waited %.0f s for %s, and the save fails after %.0f s (checkpoint.timeout_s)",
                _LOGGED_AFTER_S, self._show(path), self._limit_s,
            )  # fmt: skip
            thread.join(self._limit_s - _LOGGED_AFTER_S)
        if thread.is_alive():
            self._late = thread
            raise self._hung(verb, path, f"no answer within {self._limit_s:g} s (checkpoint.timeout_s)")
        if failures:
            raise failures[0]
        return results[0]

    def _hung(self, verb: str, path: str, cause: str) -> CheckpointError:
        hint = "look whether the file system or its server hangs, or save to another folder"
        return CheckpointError(f"cannot {verb} {self._show(path)}: {cause}", hint=hint, value=path)
