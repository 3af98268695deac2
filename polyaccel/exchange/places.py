"""Where a command finds a checkpoint: a directory of checkpoints, or the folder of one tag in it."""

from __future__ import annotations

from pathlib import Path

from polyaccel.checkpoint import CheckpointReader, TagStatus, list_checkpoints, open_checkpoint
from polyaccel.checkpoint.commit import MARKER
from polyaccel.errors import CheckpointError


def split(place: str, tag: str | None) -> tuple[str, str | None]:
    """The directory of checkpoints and the tag that `place` and `--tag` mean; no tag is the one that `latest` names.

    Raises CheckpointError where there is no such directory, or both name a tag.
    """
    path = Path(place)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{place} {what}", cure="give the directory that save_checkpoint was given", value=place)
    if not (path / MARKER).is_file():
        return place, tag
    path = path.resolve()
    if tag not in (None, path.name):
        raise CheckpointError(
            f"{place} is the checkpoint {path.name!r}, and --tag asks for {tag!r}",
            cure="give the directory that holds both, or no --tag",
            value=tag,
        )
    return str(path.parent), path.name


def opened(place: str, tag: str | None = None) -> CheckpointReader:
    """The checkpoint at `place`. Raises CheckpointError where there is none that can be read."""
    return open_checkpoint(*split(place, tag))


def listed(place: str) -> tuple[TagStatus, ...]:
    """Every tag of the directory, newest first. Raises CheckpointError where there are none."""
    directory, tag = split(place, None)
    found = tuple(status for status in list_checkpoints(directory) if tag in (None, status.tag))
    if not found:
        raise CheckpointError(
            f"{place} holds no checkpoint", cure="give the directory that save_checkpoint was given", value=place
        )
    return found
