"""A folder whose saves are made of counted steps of the operating system, at any of which the process kills itself."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any

from polyaccel.checkpoint.storage import file as module_of_storage
from polyaccel.checkpoint.storage.file import FileStorage

_NAMES = ((r"\.(.*)\.[0-9a-f]{8}-\d+-\d+-\d+\.tmp$", r"\1, unfinished"), (r"save-\d+-[0-9a-f]{8}", "save-"))


class SteppedStorage(FileStorage):
    """A folder in which the process `of` ("rank", or "writer" beside it) counts what it does to files: their creation,
    every write, sync, rename and removal. Each is a line in the file `log`; step number `at` is preceded or followed
    (`when`) by the end of the process, as by SIGKILL. Nothing is really synced: it is processes that die here."""

    API_VERSION = (2, 0)
    name = "stepped"

    def __init__(self, location: Any, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(location, options)
        is_writer = "polyaccel.checkpoint.save.async_process" in sys.modules
        if self.options and (self.options["of"] == "writer") is is_writer and not _Steps.installed:
            _Steps(self.location, self.options).install()

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> Any:
        return dict(options)


class _Steps:
    """The steps of this process below a folder."""

    installed = False

    def __init__(self, location: str, options: Mapping[str, Any]) -> None:
        self._location, self._options = os.path.realpath(location), options
        self._lock, self._count = Lock(), 0

    def install(self) -> None:
        """From now on what this process does is counted."""
        type(self).installed = True
        for verb, name in (("rename", "replace"), ("make", "mkdir"), ("remove", "unlink"), ("remove", "rmdir")):
            setattr(os, name, self._counted(verb, getattr(os, name)))
        os.fsync = self._fsync
        steps = self

        class Writer(io.BufferedWriter):
            def write(self, data: Any) -> int:
                with steps.step("write", os.fspath(self.raw.name)):  # type: ignore[attr-defined]
                    count = super().write(data)
                    self.flush()
                return count

        def opened(path: Any, mode: str) -> Any:
            if mode != "xb":
                return open(path, mode)
            with steps.step("create", os.fspath(path)):
                raw = io.FileIO(path, "xb")
            return Writer(raw)

        module_of_storage.open = opened  # type: ignore[attr-defined]

    @contextmanager
    def step(self, verb: str, path: str) -> Iterator[None]:
        """A step is taken inside, which concerns the file or folder at `path`."""
        path = os.path.realpath(path)
        if path != self._location and not path.startswith(f"{self._location}/"):
            yield
            return
        with self._lock:
            number, self._count = self._count, self._count + 1
            with open(self._options["log"], "a", encoding="utf-8") as log:
                log.write(f"{verb} {_shown(os.path.relpath(path, self._location))}\n")
        self._end_if_due(number, "before")
        yield
        self._end_if_due(number, "after")

    def _end_if_due(self, number: int, when: str) -> None:
        if (self._options["at"], self._options["when"]) == (number, when):
            os.kill(os.getpid(), signal.SIGKILL)

    def _fsync(self, descriptor: int) -> None:
        with self.step("fsync", os.readlink(f"/proc/self/fd/{descriptor}")):
            pass

    def _counted(self, verb: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            given = {} if dir_fd is None else {"dir_fd": dir_fd}
            target = os.fspath(args[0]) if verb == "rename" else os.fspath(path)
            if dir_fd is not None:
                target = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), target)
            with self.step(verb, target):
                return function(path, *args, **given, **kwargs)

        return counted


shutil.rmtree  # noqa: B018 - it looks at the functions of `os` when it is imported, which is before they are counted


def _shown(path: str) -> str:
    for pattern, written in _NAMES:
        path = re.sub(pattern, written, path)
    return path
