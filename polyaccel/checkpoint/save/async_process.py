"""The process that writes a rank's checkpoints, which `client` starts: `main(descriptor)`.

It receives jobs over the socket of that descriptor, and answers each over a socket that comes with it. It ends when its
rank has ended and its jobs have. A rank that was killed after it handed over its part loses nothing by that: what was
staged is written, and committed if all ranks came so far.

[Note: SIGTERM during a save]
The end of a job is SIGTERM to all of its processes, and SIGKILL to those that are there some seconds later. When one
rank was killed, its save is in order and should count. So on SIGTERM the writer finishes pending saves, for which it
has the time until the kill. It then waits only briefly for the parts of ranks that report nothing.

[Note: Commit by rank 0's process]
Ranks' processes know each other by the save's folder alone, on whatever storage it is. Each leaves a note in `told/`
when its file is durable, or when it failed; rank 0's waits for all of them, then commits. It gives up when its rank
requests that, and when its rank has ended and no note has come for some time.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from threading import Event, Thread, get_ident
from typing import Any, TypeVar

from polyaccel.checkpoint.collective_call import describe
from polyaccel.checkpoint.format.pieces import RankFile
from polyaccel.checkpoint.format.save_folders import RANK_NOTES, hold
from polyaccel.checkpoint.parsing import json_object
from polyaccel.checkpoint.save.async_image import Image
from polyaccel.checkpoint.save.async_job import GIVE_UP, SaveJob, receive, send
from polyaccel.checkpoint.save.protocol import SavePart, SaveTask, run_save
from polyaccel.checkpoint.save.ranks import Holders
from polyaccel.checkpoint.storage.base import Storage, open_storage
from polyaccel.errors import CheckpointError

T = TypeVar("T")
_NICENESS = 5  # training goes first
_GIVE_UP_AFTER_S = 120.0
_GIVE_UP_WHEN_ASKED_S = 3.0
_asked: list[float] = []
"""When this process was asked to end."""
_LOOK_AGAIN_S = (0.005, 0.5)
_LOOK_AGAIN = 0.05
"""The pause between two looks for a note, as a share of the time that was waited."""


def main(descriptor: int) -> None:
    """Take jobs until the rank has ended."""
    with suppress(OSError):
        os.nice(_NICENESS)
    signal.signal(signal.SIGTERM, lambda *_: _asked.append(time.monotonic()))
    rank = socket.socket(fileno=descriptor)
    jobs: list[Thread] = []
    ended = Event()
    while True:
        try:
            message = receive(rank, descriptors=2)
        except (OSError, EOFError):
            message = None
        if message is None:
            break
        data, (image, answer) = message
        jobs = [job for job in jobs if job.is_alive()]
        jobs.append(
            Thread(target=_answered, args=(SaveJob.from_bytes(data), image, socket.socket(fileno=answer), ended))
        )
        jobs[-1].start()
    ended.set()
    for job in jobs:
        job.join()


def _answered(job: SaveJob, image: int, answer: socket.socket, ended: Event) -> None:
    """Do a job and send its outcome."""
    log_lines = _LogLines()
    try:
        with answer:
            gives_up = _watch(answer, ended)
            try:
                _write(job, image, gives_up, ended)
                outcome: dict[str, Any] = {"error": None}
            except Exception as error:  # whatever it is, the rank has to receive it
                outcome = {"error": describe(error)}
            send(answer, json.dumps(outcome | {"log": log_lines.lines}).encode("ascii"))
    except OSError:
        return  # the rank has ended
    finally:
        log_lines.close()


def _write(job: SaveJob, descriptor: int, gives_up: Event, ended: Event) -> None:
    storage = open_storage(job.storage, job.location, job.options)
    layout, image = job.layout(), Image(descriptor, job.nbytes)
    with ExitStack() as owned:
        owned.callback(image.close)
        hold(owned, storage, f"{job.tag}/{job.folder}")
        part = SavePart(layout, (), job.scalars, job.about)
        task = SaveTask(storage, job.tag, part, image.reading(layout), job.save_latest, job.retention)
        commit = run_save(_NotingRanks(storage, job, gives_up, ended), task, job.folder)
        if commit is not None:
            storage.delete_tree(f"{job.tag}/{job.folder}/{RANK_NOTES}")


class _NotingRanks:
    """The processes of ranks, of which rank 0's commits. See [Note: Commit by rank 0's process]."""

    def __init__(self, storage: Storage, job: SaveJob, gives_up: Event, ended: Event) -> None:
        self._storage, self._job, self._gives_up, self._ended = storage, job, gives_up, ended
        self._others = range(1, job.world_size)
        self.is_leader = not job.rank

    def on_rank_0(self, step: str, action: Callable[[], T]) -> T:
        return action()

    def on_leaders(self, step: str, action: Callable[[], T]) -> list[T]:
        return [action()]

    def gather(self, step: str, write: Callable[[], RankFile]) -> Sequence[RankFile] | None:
        try:
            file = write()
        except Exception as error:
            message, hint = describe(error)
            with suppress(CheckpointError):
                self._leave_note({"error": message})
            raise CheckpointError(message, hint=hint) from error
        if self._job.rank:
            self._leave_note(file.to_tree())
            return None
        return [file, *map(self._received, self._others)]

    def copy(self, storage: Storage, folder: str, files: Sequence[RankFile], step: str) -> Holders:
        return {}

    def settle(self) -> None:
        """Wait for the notes of all ranks: a process that still writes makes the folder again."""
        for rank in self._others:
            with suppress(CheckpointError):
                self._received(rank)

    def _leave_note(self, tree: dict[str, Any]) -> None:
        self._storage.write(self._note(self._job.rank), [json.dumps(tree).encode("ascii")])

    def _received(self, rank: int) -> RankFile:
        """Return what another rank wrote, once its note is there."""
        path, began_s = self._note(rank), time.monotonic()
        while (nbytes := self._storage.size(path)) is None:
            waited_s = time.monotonic() - began_s
            pause_s = min(max(_LOOK_AGAIN_S[0], _LOOK_AGAIN * waited_s), _LOOK_AGAIN_S[1])
            is_late = waited_s > _GIVE_UP_AFTER_S
            if _asked:
                is_late = time.monotonic() - max(began_s, _asked[0]) > _GIVE_UP_WHEN_ASKED_S
            if self._gives_up.wait(pause_s) or (self._ended.is_set() and is_late):
                raise CheckpointError(f"rank {rank} has not written its part of {self._job.tag!r}", value=rank)
        tree = json_object(self._storage.read(path, 0, nbytes), path)
        if "error" in tree:
            raise CheckpointError(f"rank {rank}: {tree['error']}", value=rank)
        return RankFile.from_tree(tree, f"what rank {rank} wrote")

    def _note(self, rank: int) -> str:
        return f"{self._job.tag}/{self._job.folder}/{RANK_NOTES}/rank{rank:05d}.json"


def _watch(answer: socket.socket, ended: Event) -> Event:
    """An event that is set when the rank gives up; `ended` is set when it sends its last message."""
    gives_up = Event()

    def listen() -> None:
        with suppress(OSError):
            while word := answer.recv(1):
                (gives_up if word == GIVE_UP else ended).set()

    Thread(target=listen, daemon=True).start()
    return gives_up


class _LogLines(logging.Handler):
    """The lines that the job's thread logs, for the rank to log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []
        self._own = get_ident()
        logging.getLogger("polyaccel").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if get_ident() == self._own:
            self.lines.append((record.levelno, record.getMessage()))

    def close(self) -> None:
        logging.getLogger("polyaccel").removeHandler(self)
        super().close()
