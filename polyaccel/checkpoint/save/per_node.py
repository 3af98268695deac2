"""A save where hosts have separate storages: each rank writes on its host, and the neighbour gets a copy.

[Note: Commit marker per storage]
What [Note: Commit marker] says of one folder holds for all of them: every file and every copy is durable and verified
on its place before the first marker is written, anywhere. So one marker is enough to know that a save is whole, and a
save that was cut short between two markers counts: the next one first gives the marker to the places that lack it
(`complete_markers`), and only then clears up. A file of a lost place is with its neighbour, its copies are with the
place before, so any one place can be missing.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from polyaccel.checkpoint.collective_call import on_rank_0, run_on_all
from polyaccel.checkpoint.format.commit import MANIFEST, Commit, read_commit, read_manifest, tag_names, write_commit
from polyaccel.checkpoint.format.pieces import RankFile, Read, reading
from polyaccel.checkpoint.format.save_folders import clear_leftovers, new_folder, own_save, save_number
from polyaccel.checkpoint.retention.deletion import prune
from polyaccel.checkpoint.retention.rules import Retention
from polyaccel.checkpoint.save.neighbor_copies import write_copies
from polyaccel.checkpoint.save.node_topology import StorageNodes
from polyaccel.checkpoint.save.protocol import SavePart, abandon, finish, manifest_of, next_saved_at_s, require_files
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError

_log = logging.getLogger(__name__)
_logged: set[str] = set()
"""The locations that were logged as having no copy."""


def save_places(storage: Storage, communicator: Communicator) -> StorageNodes:
    """The places of a storage that hosts do not share, each with an identity; a single place is logged once.
    Collective."""
    places = StorageNodes.found(storage, communicator, may_write=True)
    if places.count == 1 and communicator.rank == 0 and storage.location not in _logged:
        _logged.add(storage.location)
        _log.info("all ranks see one storage, %s: checkpoints have no second copy on another host", storage.location)
    return places


def write_per_node(
    storage: Storage,
    places: StorageNodes,
    tag: str,
    part: SavePart,
    *,
    communicator: Communicator,
    save_latest: bool,
    retention: Retention,
    read: Read | None = None,
) -> Commit:
    """As `write_parts`, on several places. `read` gives what the part's segments hold, where `part.contents` may have
    changed. Collective."""
    rank, step = communicator.rank, f"committing {tag!r}"
    place, is_leader = places.of_rank[rank], places.is_leader(rank)
    with ExitStack() as owned:
        folder = _begin(storage, places, tag, part.layout.nbytes, communicator, owned)
        path = f"{tag}/{folder}"
        try:
            file = RankFile(part.layout.name)
            own = f"{path}/{file.name}"
            run_on_all(
                communicator,
                f"writing {tag!r}",
                lambda: storage.write(own, file.chunks(part.layout, read or reading(part.contents))),
            )
            gathered = communicator.all_gather_object(file.to_tree())
            files = [RankFile.from_tree(tree, f"what rank {other} wrote") for other, tree in enumerate(gathered)]
            write_copies(storage, path, places, files, communicator, f"copying {tag!r} to the neighbours")
            saved_at_s = max(run_on_all(communicator, step, lambda: next_saved_at_s(storage)))
            held = _held(places, files)

            def manifest() -> bytes:
                return manifest_of(tag, files, part.scalars, part.about, held=held).to_json()

            data = on_rank_0(communicator, step, manifest)
            here = {one.name: one.nbytes for one in files if places.ids[place] in dict(held[one.name])}

            def write_manifest() -> None:
                require_files(storage, path, here)
                storage.write(f"{path}/{MANIFEST}", [data])

            run_on_all(communicator, step, write_manifest if is_leader else _nothing)
        except CheckpointError:
            if is_leader:
                abandon(storage, tag, folder)
            raise
        commit = Commit(tag, folder, len(data), zlib.crc32(data), saved_at_s=saved_at_s)
        _commit(storage, commit, communicator, is_leader)

    # From here on the tag is saved, whatever happens.
    def tidy() -> None:
        finish(storage, commit, files, save_latest=save_latest)
        prune(storage, retention)

    run_on_all(communicator, f"{tag!r} is saved, but moving 'latest' to it", tidy if is_leader else _nothing)
    return commit


def complete_markers(storage: Storage, places: StorageNodes, communicator: Communicator) -> None:
    """Give every place that has a save the marker of it, where another one has that: it was cut short between two.
    Collective."""
    is_leader = places.is_leader(communicator.rank)
    gathered = run_on_all(communicator, "looking for earlier saves", lambda: markers(storage) if is_leader else {})
    newest: dict[str, Commit] = {}
    for by_tag in gathered:
        for tag, marker in by_tag.items():
            commit = Commit.from_bytes(marker, f"a commit marker of {tag!r}")
            if tag not in newest or newest[tag].saved_at_s < commit.saved_at_s:
                newest[tag] = commit

    def complete() -> None:
        for tag, commit in newest.items():
            if gathered[communicator.rank].get(tag) != commit.to_bytes():
                with suppress(CheckpointError):  # what is not here
                    read_manifest(storage, commit)
                    write_commit(storage, commit)
                    _log.info("the save %s was cut short between two hosts and is whole: it counts", commit.folder)

    run_on_all(communicator, "completing earlier saves", complete if is_leader else _nothing)


def markers(storage: Storage) -> dict[str, bytes]:
    """The commit markers of a place, by tag; those that cannot be read left out."""
    found = {}
    for tag in tag_names(storage):
        with suppress(CheckpointError):
            commit = read_commit(storage, tag)
            if commit is not None and commit.tag == tag:
                found[tag] = commit.to_bytes()
    return found


def _begin(
    storage: Storage, places: StorageNodes, tag: str, nbytes: int, communicator: Communicator, owned: ExitStack
) -> str:
    """The folder to save in, on every place, owned until `owned` is left."""
    rank, step = communicator.rank, f"preparing to save {tag!r}"
    is_leader = places.is_leader(rank)
    complete_markers(storage, places, communicator)

    def look() -> tuple[str, int]:
        if not is_leader:
            return "", nbytes
        clear_leftovers(storage)
        return new_folder(storage, tag), nbytes

    gathered = run_on_all(communicator, step, look)
    folder = max((name for name, _ in gathered if name), key=save_number)
    place = places.of_rank[rank]
    before = [other for other in range(places.count) if places.neighbour(other) == place]
    needed = sum(gathered[other][1] for each in (place, *before) for other in places.members(each))

    def prepare() -> None:
        storage.check_space(needed)
        owned.enter_context(own_save(storage, tag, folder))

    run_on_all(communicator, step, prepare if is_leader else _nothing)
    return folder


def _held(places: StorageNodes, files: Sequence[RankFile]) -> dict[str, tuple[tuple[str, str], ...]]:
    """By file, (id, name) of the places that have it: the rank's own first."""
    return {
        file.name: tuple((places.ids[at], places.names[at]) for at in (place, places.neighbour(place)))
        for file, place in zip(files, places.of_rank, strict=True)
    }


def _commit(storage: Storage, commit: Commit, communicator: Communicator, is_leader: bool) -> None:
    """Write the markers. Where that fails before any was written, nothing is left of the save; after the first it
    counts."""
    try:
        run_on_all(
            communicator,
            f"committing {commit.tag!r}",
            (lambda: write_commit(storage, commit)) if is_leader else _nothing,
        )
    except CheckpointError:
        took = is_leader and markers(storage).get(commit.tag) == commit.to_bytes()
        if not any(communicator.all_gather_object(took)) and is_leader:
            abandon(storage, commit.tag, commit.save)
        raise


def _nothing() -> None:
    """What ranks do that lead no place."""
