"""What a keeper has of the starts of a job before this one, and a checkpoint made of it."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from secrets import token_hex

from polyaccel.checkpoint.pieces import RankFile
from polyaccel.checkpoint.replica.parts import PartKey, PartNote, begun_of, files_of, parts_of
from polyaccel.checkpoint.replica.storage import KeptStorage
from polyaccel.checkpoint.scalars import decode_plain
from polyaccel.checkpoint.steps import commit_files
from polyaccel.errors import CheckpointError
from polyaccel.launch.keeper.client import KeeperClient


@dataclass(frozen=True, slots=True)
class Survivor:
    """The newest step of which all ranks' parts are there, as rank 0's part was saved at `saved_at_s` (seconds since
    1970). `last_step`: the last one that any rank had finished."""

    parts: tuple[PartKey, ...]
    saved_at_s: float
    last_step: int

    @property
    def step(self) -> int:
        return self.parts[0].step


def find_survivor(client: KeeperClient, engine: str, attempt: str) -> Survivor | None:
    """What is left of engine `engine` from the starts of the job before `attempt`; None where no step is whole, with
    weights that are finite as far as is known.

    Raises CheckpointError where the keeper is lost or the note of rank 0's part is damaged.
    """
    found = defaultdict[tuple[int, str, int], list[PartKey]](list)
    for name in client.names(parts_of(engine)):
        key = PartKey.parse(name)
        if key is not None and key.attempt != attempt:
            found[key.step, key.attempt, key.world_size].append(key)
    for (_, _, world_size), keys in sorted(found.items(), reverse=True):
        parts = sorted(keys, key=lambda key: key.rank)
        if len(parts) == world_size:
            note, memory = _part(client, parts[0])
            os.close(memory)
            if not note.file.not_finite:
                last = max(parts[0].step, last_step(client, engine, attempt))
                return Survivor(tuple(parts), note.saved_at_s, last)
    return None


def last_step(client: KeeperClient, engine: str, attempt: str) -> int:
    """The last step that a rank finished before `attempt`; 0 where none is known. Raises CheckpointError."""
    steps, folder = [0], begun_of(engine)
    for name in client.names(folder):
        kept = client.get(name)
        if kept is not None and kept.note.isdigit() and not name.startswith(f"{folder}{attempt}/"):
            steps.append(int(kept.note))
    return max(steps)


def as_checkpoint(client: KeeperClient, survivor: Survivor, engine: str) -> str:
    """Make a checkpoint of a survivor, in the keeper's memory and of the memory that is there. Returns its tag.

    Raises CheckpointError for a note that is damaged, and where the keeper is lost.
    """
    client.drop(f"{files_of(engine)}/")
    storage = KeptStorage(client, files_of(engine))
    tag, folder = f"global_step{survivor.step}", f"save-0001-{token_hex(4)}"
    files, beside, first = list[RankFile](), dict[str, int](), None
    for key in survivor.parts:
        note, memory = _part(client, key)
        try:
            storage.link(f"{tag}/{folder}/{note.file.name}", memory)
        finally:
            os.close(memory)
        name = f"rank{key.rank:05d}.bin"
        entries, blobs = note.blob_entries(name)
        if entries:
            storage.write(f"{tag}/{folder}/{name}", [blobs])
            beside[name] = len(blobs)
        note.file.blobs.extend(entries)
        files.append(note.file)
        first = first or note
    assert first is not None  # a survivor has parts
    commit_files(storage, tag, folder, files, decode_plain(first.scalars), decode_plain(first.about), beside)
    storage.close()
    return tag


def drop_others(client: KeeperClient, survivor: Survivor, engine: str) -> None:
    """Let go of the parts of earlier starts but for those of `survivor`. Raises CheckpointError."""
    kept = set(map(str, survivor.parts))
    for name in client.names(parts_of(engine)):
        if name not in kept:
            client.drop(name)


def _part(client: KeeperClient, key: PartKey) -> tuple[PartNote, int]:
    what = f"rank {key.rank}'s part of the replica of step {key.step}"
    kept = client.get(str(key))
    if kept is None or kept.memory is None:
        raise CheckpointError(f"{what} is not there any more", value=str(key))
    try:
        return PartNote.from_bytes(kept.note, what), kept.memory
    except CheckpointError:
        os.close(kept.memory)
        raise
