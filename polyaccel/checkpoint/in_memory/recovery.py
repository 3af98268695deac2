"""What keepers have of the starts of a job before this one, and a checkpoint made of it.

A keeper has the parts of the ranks of its host and, where there are several, of those of the neighbour's. So what is
left of a step are the parts of all keepers together, and one that several have may be taken from any. All ranks come to
the same choice from what one rank for each keeper sends.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex

from polyaccel.checkpoint.format.commit import Commit, write_commit
from polyaccel.checkpoint.format.manifest import Manifest, decode_plain
from polyaccel.checkpoint.format.pieces import RankFile
from polyaccel.checkpoint.format.save_folders import rank_file
from polyaccel.checkpoint.in_memory.parts import PartKey, PartNote, begun_of, files_of, parts_of
from polyaccel.checkpoint.in_memory.storage import ApartStorage, KeptStorage
from polyaccel.checkpoint.save.node_topology import StorageNodes
from polyaccel.checkpoint.save.protocol import manifest_of, publish
from polyaccel.checkpoint.save.ranks import CollectiveRanks
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError
from polyaccel.job.memory_server.client import KeeperClient

_WHO = "place"
_LOOKING = "looking for a replica"
_MAKING = "making a checkpoint of a replica"


@dataclass(frozen=True, slots=True)
class HostKeepers(CollectiveRanks):
    """Ranks whose storages are keepers: `client` is connected to this rank's. `HostTopology` does not say which ranks
    share one: a host has a keeper for each launcher's agent that runs there."""

    client: KeeperClient

    @classmethod
    def found(cls, communicator: Communicator, client: KeeperClient) -> HostKeepers:
        """Look which ranks have which keeper. Collective. Raises CheckpointError on every rank when one is lost."""
        storage = ApartStorage(client, _WHO)
        return cls(communicator, StorageNodes.found(storage, communicator, may_write=True), client)

    def storage(self, folder: str) -> KeptStorage:
        """What the keepers have in a folder."""
        return (ApartStorage if self.nodes.count > 1 else KeptStorage)(self.client, folder)


@dataclass(frozen=True, slots=True)
class RecoverableStep:
    """The newest step of which all ranks' parts are there, as rank 0's part was saved at `saved_at_s` (seconds since
    1970); `had[place]` are the ranks whose parts a keeper has. `last_step`: the last one that any rank had finished."""

    parts: tuple[PartKey, ...]
    had: tuple[frozenset[int], ...]
    saved_at_s: float
    last_step: int

    @property
    def step(self) -> int:
        return self.parts[0].step


def find_survivor(keepers: HostKeepers, engine: str, attempt: str) -> tuple[RecoverableStep | None, int]:
    """Find the newest whole step of `engine` from before `attempt`, and the last finished step. Collective."""
    gathered = keepers.on_leaders(
        _LOOKING, lambda: (list(keepers.client.names(parts_of(engine))), _last(keepers, engine, attempt))
    )
    last = max(step for _, step in gathered)
    found = defaultdict[tuple[int, str, int], list[set[int]]](lambda: [set() for _ in gathered])
    for place, (names, _) in enumerate(gathered):
        for key in map(PartKey.parse, names):
            if key is not None and key.attempt != attempt:
                found[key.step, key.attempt, key.world_size][place].add(key.rank)
    for (step, of_attempt, world_size), had in sorted(found.items(), key=lambda each: each[0], reverse=True):
        if len(set().union(*had)) < world_size:
            continue
        parts = tuple(PartKey(step, of_attempt, engine, world_size, rank) for rank in range(world_size))
        note = _notes(keepers, parts[:1])[0]
        if not note.file.not_finite:
            return RecoverableStep(parts, tuple(map(frozenset, had)), note.saved_at_s, max(step, last)), last
    return None, last


def as_checkpoint(keepers: HostKeepers, survivor: RecoverableStep, engine: str) -> str:
    """Make a checkpoint of a survivor in the keepers' memory; return its tag. Collective."""
    keepers.on_leaders(_MAKING, lambda: keepers.client.drop(f"{files_of(engine)}/"))
    notes = _notes(keepers, survivor.parts)
    storage, ids = keepers.storage(files_of(engine)), ("",) * keepers.nodes.count
    held: Mapping[str, tuple[tuple[str, str], ...]] = {}
    if not storage.is_shared:
        places = StorageNodes.found(storage, keepers.communicator, may_write=True)
        # Places are numbered by their first ranks, and keepers are too.
        ids, held = places.ids, _held(survivor, places)
    tag = f"global_step{survivor.step}"
    folder = keepers.on_rank_0(_MAKING, lambda: f"save-0001-{token_hex(4)}")
    files, blob_files = list[RankFile](), dict[str, bytes]()
    for key, note in zip(survivor.parts, notes, strict=True):
        entries, blobs = note.blob_entries(_blob_file(key.rank))
        if entries:
            blob_files[_blob_file(key.rank)] = blobs
        note.file.blobs.extend(entries)
        files.append(note.file)
    lengths = {name: len(blobs) for name, blobs in blob_files.items()}
    first = notes[0]
    scalars, about = decode_plain(first.scalars), decode_plain(first.about)

    def make_manifest() -> tuple[bytes, float]:
        manifest = manifest_of(tag, files, scalars, about, extra_files=lengths, held=held)
        return manifest.to_json(), round(time.time(), 3)

    data, saved_at_s = keepers.on_rank_0(_MAKING, make_manifest)

    def write() -> None:
        path = f"{tag}/{folder}"
        if not survivor.had[keepers.node]:  # a keeper that has begun again
            return
        for rank in survivor.had[keepers.node]:
            _link(keepers.client, storage, survivor.parts[rank], f"{path}/{files[rank].name}")
            if _blob_file(rank) in blob_files:
                storage.write(f"{path}/{_blob_file(rank)}", [blob_files[_blob_file(rank)]])
        expected = Manifest.from_json(data).expected_at(ids[keepers.node])
        publish(storage, path, data, expected)
        write_commit(storage, Commit.create(tag, folder, data, saved_at_s))

    keepers.on_leaders(_MAKING, write)
    storage.close()
    return tag


def drop_others(keepers: HostKeepers, survivor: RecoverableStep, engine: str) -> None:
    """Release the parts of earlier starts except for those of `survivor`."""
    kept = set(map(str, survivor.parts))
    if keepers.is_leader:
        with suppress(CheckpointError):  # a keeper that is lost has none
            for name in keepers.client.names(parts_of(engine)):
                if name not in kept:
                    keepers.client.drop(name)


def _last(keepers: HostKeepers, engine: str, attempt: str) -> int:
    """The last step that a rank of this keeper finished before `attempt`; 0 where none is recorded."""
    steps, folder = [0], begun_of(engine)
    for name in keepers.client.names(folder):
        kept = keepers.client.get(name)
        if kept is not None and kept.note.isdigit() and not name.startswith(f"{folder}{attempt}/"):
            steps.append(int(kept.note))
    return max(steps)


def _notes(keepers: HostKeepers, parts: Sequence[PartKey]) -> list[PartNote]:
    """The notes of parts, each from a keeper that has it whole. Collective. Raises CheckpointError."""
    gathered = keepers.on_leaders(_LOOKING, lambda: [_note(keepers.client, key) for key in parts])
    notes = list[PartNote]()
    for number, key in enumerate(parts):
        problem = CheckpointError(f"{_what(key)} is not there any more", value=str(key))
        for note in (found[number] for found in gathered if found[number]):
            try:
                notes.append(PartNote.from_bytes(note, _what(key)))
                break
            except CheckpointError as error:
                problem = error
        else:
            raise problem
    return notes


def _note(client: KeeperClient, key: PartKey) -> bytes:
    kept = client.get(str(key))
    if kept is None or kept.memory is None:
        return b""
    os.close(kept.memory)
    return kept.note


def _link(client: KeeperClient, storage: KeptStorage, key: PartKey, path: str) -> None:
    """Let a part be a file."""
    kept = client.get(str(key))
    if kept is None or kept.memory is None:
        raise CheckpointError(f"{_what(key)} is not there any more", value=str(key))
    try:
        storage.link(path, kept.memory)
    finally:
        os.close(kept.memory)


def _held(survivor: RecoverableStep, places: StorageNodes) -> Mapping[str, tuple[tuple[str, str], ...]]:
    """By file, (id, name) of the keepers that have it."""
    found = dict[str, tuple[tuple[str, str], ...]]()
    for key in survivor.parts:
        at = [place for place, ranks in enumerate(survivor.had) if key.rank in ranks]
        holders = tuple((places.ids[place], places.names[place]) for place in at)
        found |= dict.fromkeys((rank_file(key.rank), _blob_file(key.rank)), holders)
    return found


def _blob_file(rank: int) -> str:
    return f"rank{rank:05d}.bin"


def _what(key: PartKey) -> str:
    return f"rank {key.rank}'s part of the replica of step {key.step}"
