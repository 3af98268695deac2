"""The commit markers of storages that hosts do not share.

[Note: Commit marker per storage]
What [Note: Commit marker] says of one folder holds for all of them: every file and every copy is durable and verified
on its place before the first marker is written, anywhere. So one marker is enough to know that a save is whole, and a
save that was cut short between two markers counts: the next one first gives the marker to the places that lack it
(`complete_markers`), and only then clears up. A file of a lost place is with its neighbour, its copies are with the
place before, so any one place can be missing.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from polyaccel.checkpoint.format.commit import Commit, read_commit, read_manifest, tag_names, write_commit
from polyaccel.checkpoint.save.ranks import CollectiveRanks
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.errors import CheckpointError

_log = logging.getLogger(__name__)


def complete_markers(ranks: CollectiveRanks, storage: Storage) -> None:
    """Give every place of a save its marker where another place has it already. Collective."""
    own = dict[str, bytes]()

    def look() -> dict[str, bytes]:
        own.update(markers(storage))
        return own

    newest: dict[str, Commit] = {}
    for by_tag in ranks.on_leaders("looking for earlier saves", look):
        for tag, marker in by_tag.items():
            commit = Commit.from_bytes(marker, f"a commit marker of {tag!r}")
            if tag not in newest or newest[tag].saved_at_s < commit.saved_at_s:
                newest[tag] = commit

    def complete() -> None:
        for tag, commit in newest.items():
            if own.get(tag) != commit.to_bytes():
                with suppress(CheckpointError):  # what is not here
                    read_manifest(storage, commit)
                    write_commit(storage, commit)
                    _log.info("the save %s was cut short between two hosts and is whole: it counts", commit.folder)

    ranks.on_leaders("completing earlier saves", complete)


def markers(storage: Storage) -> dict[str, bytes]:
    """The commit markers of a place, by tag; those that cannot be read left out."""
    found = {}
    for tag in tag_names(storage):
        with suppress(CheckpointError):
            commit = read_commit(storage, tag)
            if commit is not None and commit.tag == tag:
                found[tag] = commit.to_bytes()
    return found
