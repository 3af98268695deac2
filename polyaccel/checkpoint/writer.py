"""Saving: every rank writes its own pieces into one file, then rank 0 makes the checkpoint exist.

The order is everything: see [Note: Commit] in `polyaccel.checkpoint.commit`.
"""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from polyaccel.checkpoint.commit import (
    MANIFEST,
    Commit,
    check_tag,
    read_commit,
    write_commit,
    write_latest,
)
from polyaccel.checkpoint.manifest import Manifest
from polyaccel.checkpoint.pieces import FileLayout, RankFile, TensorPiece, read_piece
from polyaccel.checkpoint.saves import clear_leftovers, discard, new_save, rank_file
from polyaccel.checkpoint.scalars import encode_plain
from polyaccel.checkpoint.shared_outcome import agreed, meet, on_rank_0
from polyaccel.checkpoint.storage import Storage, as_storage
from polyaccel.checkpoint.tensors import build_tensors
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError

TagValidation = Literal["Ignore", "Warn", "Fail"]
"""The reaction to ranks that save under different tags. Except with "Fail", all of them save under rank 0's."""

_log = logging.getLogger(__name__)


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
) -> Commit:
    """Save a checkpoint under `tag`, replacing one of that name; every rank calls this with its own pieces and blobs.

    `scalars` are rank 0's: plain values (see `polyaccel.checkpoint.scalars`), checked on every rank; so is `about`,
    which tells of the run. When the call
    returns, on any rank, the checkpoint is complete and durable, and `latest` names it if `save_latest`; but `latest`
    never moves to parameters that are not finite, of which the log warns.

    Raises CheckpointError on every rank when anything failed on any. The tag is then what it was before, or, if the
    very last steps failed, the new checkpoint, whole; `latest` and other tags are intact. Raises CommTimeout when a
    rank does not take part.
    """
    storage = as_storage(storage)
    meet(communicator, "save_checkpoint")

    parts: list[_Part] = []
    intents = agreed(
        communicator,
        f"save_checkpoint({tag!r})",
        lambda: (check_tag(tag), _checked_part(parts, communicator.rank, pieces, scalars, rank_blobs, about)),
    )
    tag = _one_tag([rank_tag for rank_tag, _ in intents], tag_validation)
    nbytes = sum(rank_nbytes for _, rank_nbytes in intents)
    with ExitStack() as owned:
        folder = on_rank_0(
            communicator, f"preparing to save {tag!r}", lambda: owned.enter_context(_prepare(storage, tag, nbytes))
        )
        file = RankFile(parts[0].layout.name)
        path = f"{tag}/{folder}/{file.name}"
        chunks = file.chunks(parts[0].layout, read_piece)
        try:
            agreed(communicator, f"writing {tag!r}", lambda: storage.write(path, chunks))
            told = communicator.gather_object(file.to_tree()) or ()
            files = [RankFile.from_tree(tree, f"what rank {rank} wrote") for rank, tree in enumerate(told)]
            marker = on_rank_0(
                communicator,
                f"committing {tag!r}",
                lambda: _commit(storage, tag, folder, files, parts[0]).to_bytes(),
            )
            commit = Commit.from_bytes(marker, "the commit marker that rank 0 wrote")
        except CheckpointError:
            if communicator.rank == 0:
                _abandon(storage, tag, folder)
            raise
    # From here on the tag is saved, whatever happens.
    on_rank_0(
        communicator,
        f"{tag!r} is saved, but moving 'latest' to it",
        lambda: _finish(storage, commit, files, save_latest=save_latest),
    )
    return commit


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's part of a save."""

    layout: FileLayout
    scalars: dict[str, Any]
    about: dict[str, Any]


def _checked_part(
    parts: list[_Part],
    rank: int,
    pieces: Iterable[TensorPiece],
    scalars: Mapping[str, Any],
    rank_blobs: Mapping[str, bytes],
    about: Mapping[str, Any],
) -> int:
    """Put this rank's part into `parts`, refusing what cannot be saved. Returns how many bytes it will write."""
    pieces, rank_blobs, scalars, about = tuple(pieces), dict(rank_blobs), dict(scalars), dict(about)
    encode_plain(scalars, "scalars")
    encode_plain(about, "about")
    for piece in pieces:
        piece.check()
    for name, blob in rank_blobs.items():
        _check_blob(name, blob)
    parts.append(_Part(FileLayout.plan(rank_file(rank), pieces, rank_blobs), scalars, about))
    return parts[0].layout.nbytes


def _check_blob(name: str, blob: object) -> None:
    if not isinstance(blob, bytes):
        kind = type(blob).__qualname__
        raise CheckpointError(f"rank blob {name!r} is a {kind}, not bytes", cure="give bytes", value=kind)


def _one_tag(tags: Sequence[str], validation: TagValidation) -> str:
    """Rank 0's tag, once ranks that named another one have been dealt with as `checkpoint.tag_validation` says."""
    others = {rank: tag for rank, tag in enumerate(tags) if tag != tags[0]}
    if others and validation != "Ignore":
        named = ", ".join(f"rank {rank} under {tag!r}" for rank, tag in others.items())
        message = f"rank 0 saves under the tag {tags[0]!r}, but {named}"
        if validation == "Fail":
            raise CheckpointError(message, cure="give the same tag on every rank", value=tuple(tags))
        _log.warning("%s; all ranks save under %r", message, tags[0])
    return tags[0]


@contextmanager
def _prepare(storage: Storage, tag: str, nbytes: int) -> Iterator[str]:
    """The folder to save in, owned until the block is left. Nothing of a checkpoint is touched to make room, only what
    nobody will finish."""
    clear_leftovers(storage)
    storage.check_space(nbytes)
    with new_save(storage, tag) as folder:
        yield folder


def _commit(storage: Storage, tag: str, folder: str, files: Sequence[RankFile], part: _Part) -> Commit:
    """Verify that all is there, then write the manifest, then the marker."""
    manifest = Manifest(
        tag=tag,
        world_size=len(files),
        files={file.name: file.nbytes for file in files},
        tensors=build_tensors((rank, entry) for rank, file in enumerate(files) for entry in file.tensors),
        scalars=part.scalars,
        blobs=tuple(tuple(file.blobs) for file in files),
        not_finite=next((file.not_finite for file in files if file.not_finite), ""),
        about=part.about,
    )
    manifest.check()
    for name, nbytes in manifest.files.items():
        path = f"{tag}/{folder}/{name}"
        found = storage.size(path)
        if found != nbytes:
            seen = "no file" if found is None else f"{found} bytes"
            raise CheckpointError(
                f"rank 0 sees {seen} at {path} in {storage.location}, where {nbytes} bytes were written",
                cure="save to a directory that all hosts share",
                value=path,
            )
    data = manifest.to_json()
    storage.write(f"{tag}/{folder}/{MANIFEST}", [data])
    commit = Commit(tag, folder, len(data), zlib.crc32(data), saved_at_s=round(time.time(), 3))
    write_commit(storage, commit)
    return commit


def _finish(storage: Storage, commit: Commit, files: Sequence[RankFile], *, save_latest: bool) -> None:
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


def _abandon(storage: Storage, tag: str, folder: str) -> None:
    """Remove what a failed save wrote, unless the marker came to name it: its write may fail after taking effect."""
    try:
        commit = read_commit(storage, tag)
    except CheckpointError:
        return  # then nobody knows what the marker names
    if commit is None or commit.save != folder:
        discard(storage, tag, folder)
