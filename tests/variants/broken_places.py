"""Tiers, storages, monitors and launchers that are broken in one way each. All else of them is a built-in's."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from variant_table import Broken, named

from polyaccel.checkpoint.storage.base import Storage
from polyaccel.checkpoint.storage.file import FileStorage
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError
from polyaccel.launch.base import Job, JobResult, Launcher, noop
from polyaccel.launch.local import LocalLauncher
from polyaccel.observability.metrics import JsonlMonitor, Monitor, StepMetrics
from polyaccel.offload.host import HostTier
from polyaccel.offload.tier import Fetch, Tier


class BrokenStorage(Broken, FileStorage):
    API_VERSION = (2, 0)


class WritesInPlace(BrokenStorage):
    """Not atomic: readers see what was written so far."""

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        target = Path(self.location, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb", buffering=0) as file:
            for chunk in chunks:
                file.write(chunk)


class ReadsShort(BrokenStorage):
    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        try:
            return super().read(path, offset, nbytes)
        except CheckpointError:
            return b""


class RaisesSystemErrors(BrokenStorage):
    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        with Path(self.location, path).open("rb") as file:
            file.seek(offset)
            data = file.read(nbytes)
        if len(data) < nbytes:
            raise EOFError(path)
        return data


class GathersChunks(BrokenStorage):
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        super().write(path, [b"".join(chunks)])


class LosesALastChunk(BrokenStorage):
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        pieces = list(chunks)
        super().write(path, pieces[:4])


class OrphansChunks(BrokenStorage):
    """Keeps each version of a file under a name of its own, and forgets the former one."""

    numbers = count()

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        data = b"".join(chunks)
        blobs = Path(self.location, ".blobs")
        blobs.mkdir(parents=True, exist_ok=True)
        (blobs / str(next(self.numbers))).write_bytes(data)
        super().write(path, [data])


class KeepsContents(BrokenStorage):
    """A cache without a bound."""

    cache: list[bytes] = []  # noqa: RUF012

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        self.cache.append(super().read(path, offset, nbytes))
        return self.cache[-1]


class KeepsFilesOpen(BrokenStorage):
    files: list[Any] = []  # noqa: RUF012

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        data = super().read(path, offset, nbytes)
        self.files.append(Path(self.location, path).open("rb"))  # noqa: SIM115
        return data


class ListsEverything(BrokenStorage):
    def names(self, path: str = "") -> tuple[str, ...]:
        folder = Path(self.location, path)
        return tuple(sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*")))


class DeletesTheFolder(BrokenStorage):
    def delete_tree(self, path: str) -> None:
        super().delete_tree(path.rpartition("/")[0])


class DeletesWhatBeginsAlike(BrokenStorage):
    """As an object store would that deletes by the prefix of a name."""

    def delete(self, path: str) -> None:
        folder, _, start = path.rpartition("/")
        for name in self.names(folder):
            if name.startswith(start):
                super().delete(f"{folder}/{name}")


class KeepsTheFirst(BrokenStorage):
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        if self.size(path) is None:
            super().write(path, chunks)


class BrokenTier(Broken, HostTier):
    API_VERSION = (2, 0)


class ForgetsChanges(BrokenTier):
    def stream_groups(self, groups: Any) -> Any:
        for lent in super().stream_groups(groups):
            copies = []
            for buffer in lent:
                copies.append(self.compute.allocate(buffer.numel, buffer.dtype))
                copies[-1].copy_from(buffer)
            yield copies


class LendsBackwards(BrokenTier):
    def stream_groups(self, groups: Any) -> Any:
        yield from super().stream_groups(list(groups)[::-1])


class BeginsWithRubbish(BrokenTier):
    def allocate(self, key: str, numel: int, dtype: DType) -> Buffer:
        buffer = super().allocate(key, numel, dtype)
        buffer.view(numel // 2, numel - numel // 2).fill(1)
        return buffer


class BelongsToAThread(BrokenTier):
    """Like a connection that another thread may not use."""

    def open(self, *args: Any) -> None:
        super().open(*args)
        self.thread = threading.get_ident()

    def stream_groups(self, groups: Any) -> Any:
        if threading.get_ident() != self.thread:
            raise RuntimeError("objects made in a thread can only be used in that same thread")
        yield from super().stream_groups(groups)


class SharesItsKeys(BrokenTier):
    """One memory for all tiers of a process."""

    memory: dict[str, Buffer] = {}  # noqa: RUF012

    def allocate(self, key: str, numel: int, dtype: DType) -> Buffer:
        return self.memory.setdefault(f"{key} {numel} {dtype}", super().allocate(key, numel, dtype))


class KeepsWhatItLends(BrokenTier):
    kept: list[bytes] = []  # noqa: RUF012

    def stream_groups(self, groups: Any) -> Any:
        for lent in super().stream_groups(groups):
            self.kept.extend(buffer.to_bytes() for buffer in lent)
            yield lent


class FetchesHalf(BrokenTier):
    def fetch(self, source: Buffer, target: Buffer) -> Fetch:
        half = source.numel // 2
        return super().fetch(source.view(0, half), target.view(0, half))


class LendsAfterItWasClosed(BrokenTier):
    def close(self) -> None:
        return None


class DropsAWalkThatEndsEarly(BrokenTier):
    """Writes back when the whole walk is over."""

    def stream_groups(self, groups: Any) -> Any:
        pairs = []
        for lent in super().stream_groups(groups):
            copies = [self.compute.allocate(buffer.numel, buffer.dtype) for buffer in lent]
            for copy, buffer in zip(copies, lent, strict=True):
                copy.copy_from(buffer)
                pairs.append((buffer, copy))
            yield copies
        for buffer, copy in pairs:
            buffer.copy_from(copy)


class BrokenMonitor(Broken, JsonlMonitor):
    API_VERSION = (2, 0)


class TakesEveryOption(BrokenMonitor):
    def open(self, directory: Path, options: Mapping[str, Any]) -> None:
        super().open(directory, {})


class ChokesOnNan(BrokenMonitor):
    def write(self, metrics: StepMetrics) -> None:
        assert metrics.loss == metrics.loss
        super().write(metrics)


class LosesRows(BrokenMonitor):
    def write(self, metrics: StepMetrics) -> None:
        if metrics.step % 7:
            super().write(metrics)


class LosesTheLastRows(BrokenMonitor):
    """Writes in blocks, and forgets the last one when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.block: list[StepMetrics] = []

    def write(self, metrics: StepMetrics) -> None:
        self.block.append(metrics)
        if len(self.block) == 8:
            for one in self.block:
                super().write(one)
            self.block = []


class WritesOtherNumbers(BrokenMonitor):
    def write_events(self, events: Iterable[tuple[str, float, int]]) -> None:
        super().write_events((tag, round(value, 2), step) for tag, value, step in events)


class BeginsAnew(BrokenMonitor):
    """An earlier run of the folder is gone."""

    def open(self, directory: Path, options: Mapping[str, Any]) -> None:
        (directory / self.FILE_NAME).unlink(missing_ok=True)
        super().open(directory, options)


class ClosesOnce(BrokenMonitor):
    _file: TextIO | None

    def close(self) -> None:
        if self._file is None:
            raise RuntimeError("not open")
        super().close()


class BrokenLauncher(Broken, LocalLauncher):
    API_VERSION = (3, 0)


class SwallowsCodes(BrokenLauncher):
    def run(self, job: Job, look: Any = noop) -> JobResult:
        return JobResult(min(super().run(job).code, 1))


class StartsOneTooFew(BrokenLauncher):
    def run(self, job: Job, look: Any = noop) -> JobResult:
        import dataclasses

        hosts = {host: slots[: max(1, len(slots) - 1)] for host, slots in job.hosts.items()}
        return super().run(dataclasses.replace(job, hosts=hosts))


STORAGES = named(globals(), Storage)
TIERS = named(globals(), Tier)
MONITORS = named(globals(), Monitor)
LAUNCHERS = named(globals(), Launcher)
