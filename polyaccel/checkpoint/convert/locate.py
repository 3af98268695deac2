"""Where a command finds a checkpoint: a directory of checkpoints or a URL, or the folder of one tag in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from polyaccel.checkpoint import CheckpointReader, Storage, TagStatus, list_checkpoints, open_checkpoint
from polyaccel.checkpoint.format.commit import LATEST, MARKER, tag_names
from polyaccel.checkpoint.format.recognition import recognise, recognise_names
from polyaccel.checkpoint.format.save_folders import save_folders
from polyaccel.checkpoint.storage.base import open_storage
from polyaccel.checkpoint.storage.file import FileStorage
from polyaccel.errors import CheckpointError

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)")
_GIVE = "give the directory that save_checkpoint was given"


def storage_of(place: str, storage: str | None = None) -> Storage:
    """The storage at `place`, a directory or a URL. `storage` is as in `checkpoint.storage` of a config, a name or
    JSON; without it a URL is one of fsspec's and all else a folder.

    Raises CheckpointError for text that is neither, and what loading a plugin raises.
    """
    found = _URL.fullmatch(place)
    if storage is None and (found is None or found[1] == "file"):
        return FileStorage(place if found is None else f"/{found[2].lstrip('/')}")
    name, options = _plugin(storage or "fsspec")
    return open_storage(name, place, options)


def split(place: str, tag: str | None, storage: str | None = None) -> tuple[Storage, str | None]:
    """The storage and the tag that `place` and `--tag` mean; no tag is the one that `latest` names.

    Raises CheckpointError where the directory is missing, where it holds directories of checkpoints and none itself,
    and where both name a tag.
    """
    at = storage_of(place, storage)
    if _URL.fullmatch(at.location) is None:
        path = Path(at.location)
        if not path.is_dir():
            if path.is_file() and (file := recognise_names(place, (path.name,))):
                raise file.error()
            what = "is a file" if path.exists() else "does not exist"
            raise CheckpointError(f"{place} {what}", hint=_GIVE, value=place)
        above, name = str(path.resolve().parent), path.resolve().name
    else:
        above, _, name = at.location.rstrip("/").rpartition("/")
    if at.size(MARKER) is None:
        if tag is None and at.size(LATEST) is None:
            _refuse_parent(at, place)
        return at, tag
    if tag not in (None, name):
        raise CheckpointError(
            f"{place} is the checkpoint {name!r}, and --tag asks for {tag!r}",
            hint="give the directory that holds both, or no --tag",
            value=tag,
        )
    return storage_of(above, storage), name


def opened(place: str, tag: str | None = None, storage: str | None = None) -> CheckpointReader:
    """The checkpoint at `place`. Raises CheckpointError where there is none that can be read."""
    return open_checkpoint(*split(place, tag, storage))


def listed(place: str, storage: str | None = None) -> tuple[TagStatus, ...]:
    """List every tag of the directory, newest first."""
    at, tag = split(place, None, storage)
    found = [status for status in list_checkpoints(at) if tag in (None, status.tag)]
    problems = {status.tag for status in found if status.problem}
    inner = _directories(at, problems) if problems else []
    found = [status for status in found if status.tag not in inner]
    if not any(status.is_good for status in found) and (foreign := recognise(at)):
        raise foreign.error()
    if not found:
        raise CheckpointError(f"{place} holds no checkpoint", hint=_GIVE, value=place)
    return tuple(found)


def _refuse_parent(at: Storage, place: str) -> None:
    """Raise CheckpointError where folders of `at` are directories of checkpoints and none is a checkpoint."""
    names = tag_names(at)
    inner = _directories(at, names)
    if inner and not any(at.size(f"{name}/{MARKER}") is not None for name in names):
        shown = ", ".join(f"{place.rstrip('/')}/{name}" for name in inner[:4])
        raise CheckpointError(f"{place} holds no checkpoint; {shown} does", hint=f"give {shown}", value=place)


def _directories(at: Storage, names: Any) -> list[str]:
    """Those of these folders that hold checkpoints, and are none."""
    found = []
    for name in sorted(names):
        inside = at.names(name)
        if MARKER in inside or save_folders(at, name):
            continue
        if LATEST in inside or any(at.size(f"{name}/{each}/{MARKER}") is not None for each in inside):
            found.append(name)
    return found


def _plugin(text: str) -> tuple[str, dict[str, Any]]:
    """A name and options, from a name or from JSON as `checkpoint.storage` has it."""
    if not text.lstrip().startswith("{"):
        return text, {}
    try:
        ((name, options),) = json.loads(text).items()
    except (ValueError, AttributeError) as error:
        raise CheckpointError(
            f"--storage {text}: expected a name, or JSON with one",
            hint="""write it as in the config, such as '{"fsspec": {"endpoint_url": "http://minio.local:9000"}}'""",
            value=text,
        ) from error
    return str(name), dict(options)
