"""Saving: every rank writes its own pieces into one file, then rank 0 makes the checkpoint exist.

The order is everything: see [Note: Commit marker] in `polyaccel.checkpoint.format.commit`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

from polyaccel.checkpoint.collective_call import on_rank_0, run_on_all
from polyaccel.checkpoint.format.commit import Commit
from polyaccel.checkpoint.format.pieces import RankFile, TensorPiece, reading
from polyaccel.checkpoint.format.save_folders import clear_leftovers, new_save
from polyaccel.checkpoint.retention.deletion import prune
from polyaccel.checkpoint.retention.rules import KEEP_ALL, Retention
from polyaccel.checkpoint.save.node_topology import StorageNodes
from polyaccel.checkpoint.save.per_node import save_places, write_per_node
from polyaccel.checkpoint.save.protocol import (
    SaveContents,
    SavePart,
    TagValidation,
    abandon,
    agree_on_parts,
    commit_files,
    finish,
)
from polyaccel.checkpoint.storage.base import Storage, as_storage
from polyaccel.comm.base import Communicator
from polyaccel.errors import CheckpointError


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

    `scalars` are rank 0's: plain values (see `polyaccel.checkpoint.format.scalars`), checked on every rank; so is
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
    nbytes = sum(intent.nbytes for intent in intents)
    return write_parts(
        as_storage(storage), tag, part, nbytes, communicator=communicator, save_latest=save_latest, retention=retention
    )


def write_parts(
    storage: Storage,
    tag: str,
    part: SavePart,
    nbytes: int,
    *,
    communicator: Communicator,
    save_latest: bool,
    retention: Retention,
    places: StorageNodes | None = None,
) -> Commit:
    """The rest of `save_checkpoint`: write what the ranks agreed on, `nbytes` in all. Collective. `places`: where that
    is determined already."""
    if not storage.is_shared:
        places = places or save_places(storage, communicator)
        if places.count > 1:
            return write_per_node(
                storage, places, tag, part, communicator=communicator, save_latest=save_latest, retention=retention
            )
    with ExitStack() as owned:
        folder = on_rank_0(
            communicator, f"preparing to save {tag!r}", lambda: owned.enter_context(_prepare(storage, tag, nbytes))
        )
        file = RankFile(part.layout.name)
        path = f"{tag}/{folder}/{file.name}"
        try:
            run_on_all(
                communicator,
                f"writing {tag!r}",
                lambda: storage.write(path, file.chunks(part.layout, reading(part.contents))),
            )
            gathered = communicator.gather_object(file.to_tree()) or ()
            files = [RankFile.from_tree(tree, f"what rank {rank} wrote") for rank, tree in enumerate(gathered)]
            marker = on_rank_0(
                communicator,
                f"committing {tag!r}",
                lambda: commit_files(storage, tag, folder, files, part.scalars, part.about).to_bytes(),
            )
            commit = Commit.from_bytes(marker, "the commit marker that rank 0 wrote")
        except CheckpointError:
            if communicator.rank == 0:
                abandon(storage, tag, folder)
            raise

    # From here on the tag is saved, whatever happens.
    def tidy() -> None:
        finish(storage, commit, files, save_latest=save_latest)
        prune(storage, retention)

    on_rank_0(communicator, f"{tag!r} is saved, but moving 'latest' to it", tidy)
    return commit


@contextmanager
def _prepare(storage: Storage, tag: str, nbytes: int) -> Iterator[str]:
    """The folder to save in, owned until the block is left. Nothing of a checkpoint is touched to make room, only what
    will not be finished."""
    clear_leftovers(storage)
    storage.check_space(nbytes)
    with new_save(storage, tag) as folder:
        yield folder
