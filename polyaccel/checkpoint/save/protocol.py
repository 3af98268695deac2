"""The protocol of a save, which every way to save follows.

[Note: Save protocol]
The ways differ in how ranks act together (`ranks`): training ranks or a thread of each by collectives, processes next
to the ranks by notes. The steps are the same; the order is everything, see [Note: Commit marker] in
`polyaccel.checkpoint.format.commit`.

| step | each rank | the leader of each storage |
|---|---|---|
| agree | checks its part, and the tag | |
| begin | | clears leftovers, agrees on a folder, checks for room, and writes whose it is |
| write | writes its file, durable | |
| copy | sends its file to a rank of the neighbour host, where hosts have separate storages | |
| publish | | checks that all files are there, and writes the manifest, which rank 0 has made |
| commit | | writes the marker |
| tidy | | moves `latest`, then deletes what is no longer needed |

A failure before the first marker removes the folder on every storage. After it the save counts, whatever fails.

[Note: Save protocol] in `protocol`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from polyaccel.checkpoint.collective_call import barrier, run_on_all
from polyaccel.checkpoint.format.commit import (
    MANIFEST,
    Commit,
    check_tag,
    place_id,
    read_commit,
    tag_names,
    write_commit,
    write_latest,
)
from polyaccel.checkpoint.format.manifest import Manifest, encode_plain
from polyaccel.checkpoint.format.pieces import FileLayout, RankFile, Read, TensorPiece, reading
from polyaccel.checkpoint.format.save_folders import (
    clear_leftovers,
    discard,
    new_folder,
    own_save,
    rank_file,
    save_number,
)
from polyaccel.checkpoint.format.tensors import build_tensors
from polyaccel.checkpoint.retention import KEEP_ALL, Retention, prune
from polyaccel.checkpoint.save.per_node import complete_markers
from polyaccel.checkpoint.save.ranks import CollectiveRanks, SaveRanks
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.checkpoint.storage.file import as_storage
from polyaccel.checkpoint.storage.owner import ProcessIdentity
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError

TagValidation = Literal["Ignore", "Warn", "Fail"]
"""The reaction to ranks that save under different tags. Except with "Fail", all of them save under rank 0's."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveContents:
    """What a rank saves, as `save_checkpoint` takes it. `frozen` are parameters that no update writes."""

    pieces: Callable[[], Iterable[TensorPiece]]
    scalars: Mapping[str, Any]
    rank_blobs: Mapping[str, Any]
    """Bytes, which is checked."""
    frozen: Collection[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SavePart:
    """One rank's part of a save: its file, with what its segments hold, and the values of which rank 0's are saved."""

    layout: FileLayout
    contents: Sequence[TensorPiece | bytes]
    scalars: Mapping[str, Any]
    about: Mapping[str, Any]

    @classmethod
    def checked(
        cls,
        rank: int,
        contents: SaveContents,
        about: Mapping[str, Any],
    ) -> SavePart:
        """The part of a rank. Raises CheckpointError for what cannot be saved."""
        pieces, blobs, scalars = tuple(contents.pieces()), dict(contents.rank_blobs), contents.scalars
        encode_plain(dict(scalars), "scalars")
        encode_plain(dict(about), "about")
        for piece in pieces:
            piece.check()
        for name, blob in blobs.items():
            if not isinstance(blob, bytes):
                kind = type(blob).__qualname__
                raise CheckpointError(f"rank blob {name!r} is a {kind}, not bytes", hint="give bytes", value=kind)
        sizes = {name: len(blob) for name, blob in blobs.items()}
        layout = FileLayout.plan(rank_file(rank), [piece.spec for piece in pieces], sizes)
        return cls(layout, (*pieces, *blobs.values()), dict(scalars), dict(about))


@dataclass(frozen=True, slots=True)
class SaveTask:
    """A rank's side of a save: `read` gives what the segments of `part` hold, which may be a copy of its contents."""

    storage: Storage
    tag: str
    part: SavePart
    read: Read
    save_latest: bool
    retention: Retention


class Intent(NamedTuple):
    """What a rank is about to save: under which tag, how many bytes, and whether there is room to stage them."""

    tag: str
    nbytes: int
    has_room: bool


def agree_on_parts(
    communicator: Communicator,
    tag: str,
    make: Callable[[], SavePart],
    validation: TagValidation,
    *,
    has_room: Callable[[int], bool] = lambda nbytes: False,
) -> tuple[str, SavePart, list[Intent]]:
    """Return the agreed tag, this rank's part from `make`, and all ranks' intents. Collective."""
    barrier(communicator, "save_checkpoint")
    parts: list[SavePart] = []

    def check() -> tuple[str, int, bool]:
        parts.append(make())
        nbytes = parts[0].layout.nbytes
        return check_tag(tag), nbytes, has_room(nbytes)

    intents = [Intent(*fields) for fields in run_on_all(communicator, f"save_checkpoint({tag!r})", check)]
    return one_tag([intent.tag for intent in intents], validation), parts[0], intents


def one_tag(tags: Sequence[str], validation: TagValidation) -> str:
    """Return rank 0's tag, once other tags have been dealt with by `checkpoint.tag_validation`."""
    others = {rank: tag for rank, tag in enumerate(tags) if tag != tags[0]}
    if others and validation != "Ignore":
        named = ", ".join(f"rank {rank} under {tag!r}" for rank, tag in others.items())
        message = f"rank 0 saves under the tag {tags[0]!r}, but {named}"
        if validation == "Fail":
            raise CheckpointError(message, hint="give the same tag on every rank", value=tuple(tags))
        _log.warning("%s; all ranks save under %r", message, tags[0])
    return tags[0]


def begin_save(
    ranks: CollectiveRanks,
    storage: Storage,
    tag: str,
    nbytes: Sequence[int],
    owned: ExitStack,
    owner: Callable[[], ProcessIdentity] = ProcessIdentity.me,
) -> str:
    """Return the folder to save in, owned until `owned` is closed; `nbytes` by rank. Collective."""
    step = f"preparing to save {tag!r}"
    if ranks.nodes.count > 1:
        complete_markers(ranks, storage)

    def look() -> str:
        clear_leftovers(storage)
        return new_folder(storage, tag)

    folder = max(ranks.on_leaders(step, look), key=save_number)

    def prepare() -> None:
        storage.check_space(sum(nbytes[rank] for rank in ranks.nodes.kept_by(ranks.node)))
        own_save(owned, storage, tag, folder, owner())

    ranks.on_leaders(step, prepare)
    return folder


def run_save(ranks: SaveRanks, task: SaveTask, folder: str) -> Commit | None:
    """Take the steps of a save from the write on; None on ranks that end earlier."""
    storage, tag, part, commit = task.storage, task.tag, task.part, None
    path, step = f"{tag}/{folder}", f"committing {tag!r}"

    def write() -> RankFile:
        file = RankFile(part.layout.name)
        storage.write(f"{path}/{file.name}", file.chunks(part.layout, task.read))
        return file

    try:
        files = ranks.gather(f"writing {tag!r}", write)
        if files is None:
            return None
        held = ranks.copy(storage, path, files, f"copying {tag!r} to the neighbours")
        saved_at_s = max(ranks.on_leaders(step, lambda: next_saved_at_s(storage)))
        data = ranks.on_rank_0(step, lambda: manifest_of(tag, files, part.scalars, part.about, held=held).to_json())

        def publish_here() -> None:
            own = place_id(storage) if held else ""
            here = {file.name: file.nbytes for file in files if not held or own in dict(held[file.name])}
            publish(storage, path, data, here)

        ranks.on_leaders(step, publish_here)
        commit = marker = Commit.create(tag, folder, data, saved_at_s)
        ranks.on_leaders(step, lambda: write_commit(storage, marker))
    except CheckpointError:
        # The write of a marker may fail after it took effect.
        counts = commit is not None and any(ranks.on_leaders(step, lambda: _may_be_committed(storage, tag, folder)))
        if ranks.is_leader and not counts:
            ranks.settle()
            remove(storage, tag, folder)
        raise

    def tidy() -> None:
        finish(storage, marker, files, save_latest=task.save_latest)
        prune(storage, task.retention)

    ranks.on_leaders(f"{tag!r} is saved, but moving 'latest' to it", tidy)
    return commit


def save_parts(ranks: CollectiveRanks, task: SaveTask, nbytes: Sequence[int]) -> Commit:
    """Save what the ranks agreed on: `begin_save`, then `run_save`. Collective."""
    with ExitStack() as owned:
        commit = run_save(ranks, task, begin_save(ranks, task.storage, task.tag, nbytes, owned))
    assert commit is not None  # every rank takes all steps
    return commit


def publish(storage: Storage, folder: str, manifest: bytes, files: Mapping[str, int]) -> None:
    """Write the manifest once `files`, with these lengths, are there."""
    require_files(storage, folder, files)
    storage.write(f"{folder}/{MANIFEST}", [manifest])


def manifest_of(
    tag: str,
    files: Sequence[RankFile],
    scalars: Mapping[str, Any],
    about: Mapping[str, Any],
    *,
    extra_files: Mapping[str, int] = MappingProxyType({}),
    held: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType({}),
) -> Manifest:
    """Make and check the manifest; `extra_files` has lengths of files with blobs only."""
    manifest = Manifest(
        tag=tag,
        world_size=len(files),
        files={file.name: file.nbytes for file in files} | dict(extra_files),
        tensors=build_tensors((rank, entry) for rank, file in enumerate(files) for entry in file.tensors),
        scalars=dict(scalars),
        blobs=tuple(tuple(file.blobs) for file in files),
        not_finite=next((file.not_finite for file in files if file.not_finite), ""),
        about=dict(about),
        held=dict(held),
    )
    manifest.check()
    return manifest


def require_files(storage: Storage, folder: str, files: Mapping[str, int]) -> None:
    """Raise CheckpointError unless `storage` shows each of these files, of which the lengths are given."""
    for name, nbytes in files.items():
        path = f"{folder}/{name}"
        found = storage.size(path)
        if found != nbytes:
            seen = "no file" if found is None else f"{found} bytes"
            raise CheckpointError(
                f"rank 0 sees {seen} at {path} in {storage.location}, where {nbytes} bytes were written",
                hint="save to a directory that all hosts share, or to each host's own by "
                '"checkpoint": {"storage": "node_local"}',
                value=path,
            )


def next_saved_at_s(storage: Storage) -> float:
    """The time, but later than that of every checkpoint there: it distinguishes them, and clocks are set back."""
    saved_at_s = [0.0]
    for tag in tag_names(storage):
        with suppress(CheckpointError):  # no marker, or a damaged one
            commit = read_commit(storage, tag)
            saved_at_s.append(commit.saved_at_s if commit else 0.0)
    return round(max(time.time(), max(saved_at_s) + 0.001), 3)


def finish(storage: Storage, commit: Commit, files: Sequence[RankFile], *, save_latest: bool) -> None:
    """Move `latest`, unless a parameter is not finite, then delete the tag's earlier saves."""
    not_finite = next((file.not_finite for file in files if file.not_finite), "")
    if not_finite:
        _log.warning(
            "%r holds values of %s that are not finite: nothing resumes from it unless it is named%s",
            commit.tag, not_finite, "; 'latest' stays where it was" if save_latest else "",
        )  # fmt: skip
    elif save_latest:
        write_latest(storage, commit.tag)
    clear_leftovers(storage, commit.tag)


def remove(storage: Storage, tag: str, folder: str) -> None:
    """Remove what a failed save wrote, which no marker names."""
    discard(storage, tag, folder)
    with suppress(CheckpointError):
        storage.clear_unfinished(tag, if_empty=True)


def _may_be_committed(storage: Storage, tag: str, folder: str) -> bool:
    """Return whether the marker names the save, or cannot be read."""
    try:
        commit = read_commit(storage, tag)
    except CheckpointError:
        return True
    return commit is not None and commit.save == folder


def save_checkpoint(
    storage: Storage | str | os.PathLike[str],
    tag: str,
    *,
    communicator: Communicator,
    pieces: Iterable[TensorPiece],
    scalars: Mapping[str, Any],
    rank_blobs: Mapping[str, bytes],
    tag_validation: TagValidation = "Warn",
    save_latest: bool = True,
    about: Mapping[str, Any] = MappingProxyType({}),
    retention: Retention = KEEP_ALL,
) -> Commit:
    """Save a checkpoint under `tag`, replacing one of that name; every rank calls this with its own pieces and blobs.

    `scalars` are rank 0's: plain values (see `polyaccel.checkpoint.format.manifest`), checked on every rank; so is
    `about`, which describes the run. When the call returns, on any rank, the checkpoint is complete and durable, and
    `latest` names it if `save_latest`; but `latest` never moves to parameters that are not finite, of which the log
    warns. Last of all, rank 0 deletes the tags that its `retention` does not keep.

    Raises CheckpointError on every rank when anything failed on any. The tag is then what it was before, or, if the
    very last steps failed, the new checkpoint, whole; `latest` and other tags are intact. Raises CommTimeout when a
    rank does not take part.
    """
    tag, part, intents = agree_on_parts(
        communicator,
        tag,
        lambda: SavePart.checked(communicator.rank, SaveContents(lambda: pieces, scalars, rank_blobs), about),
        tag_validation,
    )
    task = SaveTask(as_storage(storage), tag, part, reading(part.contents), save_latest, retention)
    ranks = CollectiveRanks.discover(task.storage, communicator)
    return save_parts(ranks, task, [intent.nbytes for intent in intents])
