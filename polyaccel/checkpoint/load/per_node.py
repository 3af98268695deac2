"""Select the newest checkpoint whose files are all present on the current hosts (node-local storage).

Every place lists what it holds, and all ranks make the same choice from these lists. A marker on one place
is enough, see [Note: Commit marker per storage] in `polyaccel.checkpoint.save.per_node`.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from polyaccel.checkpoint.collective_call import run_on_all
from polyaccel.checkpoint.format.commit import MANIFEST, Commit, check_tag, read_latest
from polyaccel.checkpoint.format.extents import FileLocations
from polyaccel.checkpoint.format.manifest import Manifest
from polyaccel.checkpoint.save.node_topology import StorageNodes
from polyaccel.checkpoint.save.per_node import markers
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError

_log = logging.getLogger(__name__)
_STEP = "opening a checkpoint"


@dataclass(frozen=True, slots=True)
class ChosenSave:
    """A save that all ranks read: its marker, its manifest, and which place has which of its files."""

    commit: Commit
    manifest: Manifest
    locations: FileLocations


def select_checkpoint(storage: Storage, tag: str | None, communicator: Communicator, *, fallback: bool) -> ChosenSave:
    """Select a checkpoint as `open_checkpoint` does, over hosts' separate storages. Collective."""
    places = StorageNodes.found(storage, communicator, may_write=False)
    is_leader = places.is_leader(communicator.rank)
    gathered = run_on_all(communicator, _STEP, lambda: _look(storage, tag) if is_leader else ("", {}))
    commits = _by_tag([found for _, found in gathered])
    problems: list[str] = []
    try:
        wanted = _wanted(tag, [latest for latest, _ in gathered], commits, places)
    except CheckpointError as error:
        problems.append(error.message)
        wanted = ()
    others = [commit for each in commits.values() for commit in each if commit not in wanted]
    others.sort(key=lambda commit: (commit.saved_at_s, commit.tag), reverse=True)
    is_free = fallback and tag is None
    for commit in (*wanted, *(others if is_free else ())):
        try:
            chosen = _had(storage, places, commit, communicator)
        except CheckpointError as error:
            problems.append(error.message)
            continue
        if chosen.manifest.not_finite and commit not in wanted:
            continue
        if problems and communicator.rank == 0:
            _log.warning("%s; loading %r, of %s, instead", problems[0], commit.tag, commit.save)
        return chosen
    tags = ", ".join(sorted({commit.tag for commit in others})) or "none"
    raise CheckpointError(
        f"{'; '.join(problems)}\n  hosts here: {', '.join(places.names)}; other tags that they have markers of: {tags}",
        hint="start the job on the hosts that have the files, or load another tag",
        value=tag,
    )


def _look(storage: Storage, tag: str | None) -> tuple[str, dict[str, bytes]]:
    """What `latest` names here, and the markers."""
    try:
        latest = (read_latest(storage) or "") if tag is None else ""
    except CheckpointError:  # damaged; another place's will do
        latest = ""
    return latest, markers(storage)


def _by_tag(found: Sequence[Mapping[str, bytes]]) -> dict[str, tuple[Commit, ...]]:
    """Of each tag the saves that a marker names, newest first: two where a save was cut short between two markers."""
    commits: dict[str, set[Commit]] = {}
    for by_tag in found:
        for tag, marker in by_tag.items():
            commits.setdefault(tag, set()).add(Commit.from_bytes(marker, f"a commit marker of {tag!r}"))
    return {
        tag: tuple(sorted(each, key=lambda commit: (commit.saved_at_s, commit.save), reverse=True))
        for tag, each in commits.items()
    }


def _wanted(
    tag: str | None, latest: Sequence[str], commits: Mapping[str, tuple[Commit, ...]], places: StorageNodes
) -> tuple[Commit, ...]:
    """The saves of the tag that was asked for; of those that places call the latest, the newest."""
    where = ", ".join(places.names)
    if tag is None:
        named = [commits[each] for each in set(latest) if each in commits]
        if not named:
            raise CheckpointError(f"no file 'latest' in {where} names a checkpoint")
        return max(named, key=lambda each: each[0].saved_at_s)
    if check_tag(tag) not in commits:
        raise CheckpointError(f"checkpoint {tag!r} in {where} was never completed or does not exist", value=tag)
    return commits[tag]


def _had(storage: Storage, places: StorageNodes, commit: Commit, communicator: Communicator) -> ChosenSave:
    """The save that a marker names. Raises CheckpointError, on every rank, unless every file is on some place."""
    rank = communicator.rank
    is_leader = places.is_leader(rank)
    gathered = run_on_all(communicator, _STEP, lambda: _files(storage, commit) if is_leader else {})
    leaders = [places.members(place)[0] for place in range(places.count)]
    data = b""
    for leader in leaders:
        if gathered[leader].get(MANIFEST) == commit.manifest_nbytes and not data:
            read = partial(_manifest, storage, commit) if rank == leader else bytes
            data = run_on_all(communicator, _STEP, read)[leader]
    if not data:
        raise CheckpointError(f"{commit.folder}/{MANIFEST} is on none of {', '.join(places.names)}, or is damaged")
    manifest = Manifest.from_json(data, f"{commit.folder}/{MANIFEST}")
    manifest.check()
    here = tuple(
        frozenset(name for name, nbytes in manifest.files.items() if gathered[leader].get(name) == nbytes)
        for leader in leaders
    )
    missing = list(_missing(commit, manifest, here))
    if missing:
        raise CheckpointError(f"{commit.tag!r} lacks {'; '.join(missing[:8])}", value=commit.tag)
    return ChosenSave(commit, manifest, FileLocations(places.of_rank, places.names, here))


def _missing(commit: Commit, manifest: Manifest, here: Sequence[frozenset[str]]) -> Iterator[str]:
    for name in manifest.files:
        if not any(name in files for files in here):
            held = " and ".join(place for _, place in manifest.held.get(name, ())) or "an unknown place"
            yield f"{commit.folder}/{name}, which {held} had, and no rank here has it whole"


def _files(storage: Storage, commit: Commit) -> dict[str, Any]:
    """The files of a save in this place, with their lengths."""
    folder = commit.folder
    sizes = ((name, storage.size(f"{folder}/{name}")) for name in storage.names(folder))
    return {name: nbytes for name, nbytes in sizes if nbytes is not None}


def _manifest(storage: Storage, commit: Commit) -> bytes:
    """The manifest; nothing where it is damaged."""
    data = b""
    with suppress(CheckpointError):
        data = storage.read(f"{commit.folder}/{MANIFEST}", 0, commit.manifest_nbytes)
    return data if zlib.crc32(data) == commit.manifest_crc32 else b""
