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
from contextlib import suppress
from threading import Event, Thread, get_ident
from typing import Any

from polyaccel.checkpoint.format.pieces import RankFile
from polyaccel.checkpoint.format.save_folders import RANK_NOTES, held
from polyaccel.checkpoint.parsing import json_object
from polyaccel.checkpoint.retention.deletion import prune
from polyaccel.checkpoint.save.async_image import Image
from polyaccel.checkpoint.save.async_job import GIVE_UP, SaveJob, receive, send
from polyaccel.checkpoint.save.protocol import abandon, commit_files, finish
from polyaccel.checkpoint.storage.base import Storage, open_storage
from polyaccel.errors import CheckpointError, PolyaccelError

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
        jobs = [each for each in jobs if each.is_alive()]
        jobs.append(
            Thread(target=_answered, args=(SaveJob.from_bytes(data), image, socket.socket(fileno=answer), ended))
        )
        jobs[-1].start()
    ended.set()
    for each in jobs:
        each.join()


def _answered(job: SaveJob, image: int, answer: socket.socket, ended: Event) -> None:
    """Do a job and send its outcome."""
    log_lines = _LogLines()
    try:
        with answer:
            gives_up = _watch(answer, ended)
            try:
                _write(job, image, gives_up, ended)
                outcome: dict[str, Any] = {"error": None}
            except PolyaccelError as error:
                outcome = {"error": [error.message, error.hint]}
            except Exception as error:  # whatever it is, the rank has to receive it
                outcome = {"error": [f"{type(error).__name__}: {error}", ""]}
            send(answer, json.dumps(outcome | {"log": log_lines.lines}).encode("ascii"))
    except OSError:
        return  # the rank has ended
    finally:
        log_lines.close()


def _write(job: SaveJob, descriptor: int, gives_up: Event, ended: Event) -> None:
    storage = open_storage(job.storage, job.location, job.options)

    def abandon_all() -> None:
        """Remove what was written once no process writes any more: one that does makes the folder again."""
        for rank in range(1, job.world_size):
            with suppress(CheckpointError):
                _received(storage, job, rank, gives_up, ended)
        abandon(storage, job.tag, job.folder)

    with held(storage, f"{job.tag}/{job.folder}"):
        try:
            file = _written(job, storage, descriptor)
        except Exception as error:
            with suppress(CheckpointError):
                _tell(storage, job, {"error": f"{getattr(error, 'message', error)}"})
            if not job.rank:
                abandon_all()
            raise
        if job.rank:
            _tell(storage, job, file.to_tree())
            return
        try:
            files = [file, *(_received(storage, job, rank, gives_up, ended) for rank in range(1, job.world_size))]
            commit = commit_files(storage, job.tag, job.folder, files, job.scalars, job.about)
        except CheckpointError:
            abandon_all()
            raise
        finish(storage, commit, files, save_latest=job.save_latest)
        storage.delete_tree(f"{job.tag}/{job.folder}/{RANK_NOTES}")
        prune(storage, job.retention)


def _written(job: SaveJob, storage: Storage, descriptor: int) -> RankFile:
    layout, image = job.layout(), Image(descriptor, job.nbytes)
    try:
        written = RankFile(layout.name)
        storage.write(f"{job.tag}/{job.folder}/{layout.name}", written.chunks(layout, image.reading(layout)))
        return written
    finally:
        image.close()


def _tell(storage: Storage, job: SaveJob, tree: dict[str, Any]) -> None:
    storage.write(_note(job, job.rank), [json.dumps(tree).encode("ascii")])


def _received(storage: Storage, job: SaveJob, rank: int, gives_up: Event, ended: Event) -> RankFile:
    """Return what another rank wrote, once its note is there."""
    path, began_s = _note(job, rank), time.monotonic()
    while (nbytes := storage.size(path)) is None:
        waited_s = time.monotonic() - began_s
        pause_s = min(max(_LOOK_AGAIN_S[0], _LOOK_AGAIN * waited_s), _LOOK_AGAIN_S[1])
        is_late = waited_s > _GIVE_UP_AFTER_S
        if _asked:
            is_late = time.monotonic() - max(began_s, _asked[0]) > _GIVE_UP_WHEN_ASKED_S
        if gives_up.wait(pause_s) or (ended.is_set() and is_late):
            raise CheckpointError(f"rank {rank} has not written its part of {job.tag!r}", value=rank)
    tree = json_object(storage.read(path, 0, nbytes), path)
    if "error" in tree:
        raise CheckpointError(f"rank {rank}: {tree['error']}", value=rank)
    return RankFile.from_tree(tree, f"what rank {rank} wrote")


def _note(job: SaveJob, rank: int) -> str:
    return f"{job.tag}/{job.folder}/{RANK_NOTES}/rank{rank:05d}.json"


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
