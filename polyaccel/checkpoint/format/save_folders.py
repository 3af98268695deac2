"""The folders that saves are written into: whose they are, and which of them will not be finished or read.

[Note: Concurrent saves]
Several jobs may save into one directory, even under one tag. Each writes into a folder of a name that no other has,
and into that, first of all, a note of the process that saves. The tag is what its marker names, so the last one to
commit has it. A folder may be deleted when its owner is dead, or does not save any more, *and then* the marker names
another: a save that has ended has replaced the marker before, so a folder that is found without a living owner is
either the one that the marker names from then on, or one that no marker will name. An empty folder is one whose note
is about to be written; `Storage.clear_unfinished` checks whether its process is dead.
"""

from __future__ import annotations

import json
import logging
import re
import time
from contextlib import ExitStack, suppress
from secrets import token_hex

from polyaccel.checkpoint.format.commit import MARKER, read_commit, tag_names
from polyaccel.checkpoint.parsing import json_object, parsed
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.checkpoint.storage.owner import OwnerNote, ProcessIdentity
from polyaccel.errors import CheckpointError

OWNER = "owner.json"
RANK_NOTES = "told"
"""Where in the folder of a save in the background each rank's process notes what it wrote."""
_SAVE = re.compile(r"save-(\d{4,12})(-[0-9a-f]{8})?")
_OURS = re.compile(r"owner\.json|manifest\.json|told|rank\d{5,}\.(safetensors|bin)")
_log = logging.getLogger(__name__)
_saving: set[tuple[str, str]] = set()
"""The (location, folder) of every save that this process, or one that writes for it, is in the middle of."""
_writers: set[ProcessIdentity] = set()
"""The processes that write for this one."""


def rank_file(rank: int) -> str:
    """The name of a rank's file in the folder of a save."""
    return f"rank{rank:05d}.safetensors"


def save_folders(storage: Storage, tag: str) -> tuple[str, ...]:
    """The folders of a tag's saves: committed, under way or abandoned."""
    return tuple(name for name in storage.names(tag) if _SAVE.fullmatch(name))


def save_number(folder: str) -> int:
    """The number in the name of a save's folder; later saves of a tag have higher ones."""
    return int(folder.split("-")[1])


def new_folder(storage: Storage, tag: str) -> str:
    """A name that no other save of `tag` has. Warns where a living process is saving that tag."""
    numbers = [0]
    for name in save_folders(storage, tag):
        numbers.append(save_number(name))
        other = _living_owner(storage, f"{tag}/{name}")
        if other is not None:
            _log.warning(
                "process %d on %s is saving %r in %s too: the tag will be the checkpoint of the one that ends last",
                other.pid, other.host, tag, storage.location,
            )  # fmt: skip
    return f"save-{max(numbers) + 1:04d}-{token_hex(4)}"


def own_save(owned: ExitStack, storage: Storage, tag: str, folder: str, owner: ProcessIdentity) -> None:
    """Write `owner`'s note into a new folder for a save of `tag`; it counts as saving until `owned` is closed."""
    if owner != ProcessIdentity.me():
        _writers.add(owner)
    hold(owned, storage, f"{tag}/{folder}")
    note_owner(storage, f"{tag}/{folder}", owner)


def hold(owned: ExitStack, storage: Storage, folder: str) -> None:
    """Register this process, or one that writes for it, as saving into `folder` until `owned` is closed."""
    key = (storage.location, folder)
    _saving.add(key)
    owned.callback(_saving.discard, key)


def note_owner(storage: Storage, folder: str, owner: ProcessIdentity) -> None:
    """Write whose a folder is, as its first file. Where that cannot be written, there is no folder."""
    note = OwnerNote.by(owner, round(time.time(), 3))
    try:
        storage.write(f"{folder}/{OWNER}", [json.dumps(note.model_dump()).encode("ascii")])
    except CheckpointError:
        with suppress(CheckpointError):
            storage.delete_tree(folder)
            storage.clear_unfinished(folder.partition("/")[0], if_empty=True)
        raise


def clear_leftovers(storage: Storage, tag: str | None = None) -> None:
    """Delete unfinished and replaced saves, under `tag` or everywhere; log what cannot be deleted."""
    try:
        storage.clear_unfinished()
        for each in tag_names(storage) if tag is None else (tag,):
            _clear_tag(storage, each)
    except CheckpointError as error:
        _log.warning("could not clear what earlier saves left in %s: %s", storage.location, error)


def discard(storage: Storage, tag: str, folder: str) -> None:
    """Remove a folder that no marker names."""
    try:
        storage.delete_tree(f"{tag}/{folder}")
    except CheckpointError as error:
        _log.warning("could not remove %s/%s, which is no longer needed: %s", tag, folder, error)


def _clear_tag(storage: Storage, tag: str) -> None:
    names = storage.names(tag)
    saves = [name for name in names if _SAVE.fullmatch(name)]
    if not saves or (len(saves) == 1 and MARKER in names):  # as nearly always: no checkpoint of ours, or a whole one
        storage.clear_unfinished(tag)
        return
    for folder in saves:
        path = f"{tag}/{folder}"
        files = storage.names(path)
        if not files:
            storage.clear_unfinished(path, if_empty=True)
        elif all(_OURS.fullmatch(name) for name in files) and _living_owner(storage, path) is None:
            commit = read_commit(storage, tag)  # after the owner: see [Note: Concurrent saves]
            if commit is None or commit.save != folder:
                discard(storage, tag, folder)
    storage.clear_unfinished(tag, if_empty=True)


def _living_owner(storage: Storage, folder: str) -> OwnerNote | None:
    """The process that is saving into a folder; None without one."""
    path = f"{folder}/{OWNER}"
    nbytes = storage.size(path)
    if nbytes is None:
        return None
    try:
        note = parsed(OwnerNote, json_object(storage.read(path, 0, min(nbytes, 4096)), path), path)
    except CheckpointError:  # no note of ours, which are whole
        return None
    if note.owner == ProcessIdentity.me() or note.owner in _writers:
        return note if (storage.location, folder) in _saving else None
    return note if note.owner.is_alive(time.time() - note.since_s) else None
