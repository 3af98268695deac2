"""A save while training waits: see [Note: Save protocol] in `protocol`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from polyaccel.checkpoint.format.commit import Commit
from polyaccel.checkpoint.format.pieces import TensorPiece, reading
from polyaccel.checkpoint.retention.rules import KEEP_ALL, Retention
from polyaccel.checkpoint.save.protocol import (
    SaveContents,
    SavePart,
    SaveTask,
    TagValidation,
    agree_on_parts,
    save_parts,
)
from polyaccel.checkpoint.save.ranks import CollectiveRanks
from polyaccel.checkpoint.storage.base import Storage, as_storage
from polyaccel.comm.base import Communicator


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
    task = SaveTask(as_storage(storage), tag, part, reading(part.contents), save_latest, retention)
    ranks = CollectiveRanks.of(task.storage, communicator)
    return save_parts(ranks, task, [intent.nbytes for intent in intents])
