"""Which checkpoints a directory holds, and which of them are complete.

    latest                        the tag to resume from, as text
    <tag>/commit.json             the commit marker: names the save that counts
    <tag>/save-0001-5f0a77c2/owner.json
    <tag>/save-0001-5f0a77c2/rank00000.safetensors
    <tag>/save-0001-5f0a77c2/manifest.json

[Note: Commit marker]
A save exists only where a commit marker names it. The marker is written last, in one atomic replacement, after every
file it stands for is durable, so a save that was cut short leaves a folder that no marker names. Saving a tag again
writes another `save-` folder next to the first and then replaces the marker: at every instant the tag is the old
checkpoint or the new one, whole. The old folder goes only after that, and `latest` moves only after the marker.
"""

from __future__ import annotations

import json
import re
import socket
import zlib
from dataclasses import asdict, dataclass
from typing import Any

from polyaccel.checkpoint.format.manifest import FORMAT, Manifest, check_format
from polyaccel.checkpoint.parsing import CommitTree, json_object, parsed
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.errors import CheckpointError

LATEST = "latest"
MARKER = "commit.json"
MANIFEST = "manifest.json"
_MOST_NBYTES = 65536
"""Longer markers and `latest` are not ours, and are not read."""
NOTE = "place.json"
_ID = re.compile(r"[0-9a-f]{16}")
_MOST_NOTE_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit marker: the save that counts for `tag`, and the length and checksum (zlib's crc32) of its manifest.

    `saved_at_s` is seconds since 1970 by the clock of rank 0; it orders the tags of a directory.
    """

    tag: str
    save: str
    manifest_nbytes: int
    manifest_crc32: int
    saved_at_s: float

    @classmethod
    def create(cls, tag: str, save: str, manifest: bytes, saved_at_s: float) -> Commit:
        """Make the marker of a save with that manifest."""
        return cls(tag, save, len(manifest), zlib.crc32(manifest), saved_at_s)

    @property
    def folder(self) -> str:
        """Where the files of this save are, relative to the storage."""
        return f"{self.tag}/{self.save}"

    def to_bytes(self) -> bytes:
        """A line of JSON and a line with its own checksum."""
        body = json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":")).encode("ascii")
        return body + b"\n%08x\n" % zlib.crc32(body)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Commit:
        """The inverse of `to_bytes`. Raises CheckpointError, naming `path`, for anything else."""
        body, _, rest = data.partition(b"\n")
        if rest != b"%08x\n" % zlib.crc32(body):
            raise CheckpointError(f"{path} is damaged: its checksum is wrong", hint="load another tag", value=path)
        tree = json_object(body, path)
        check_format(tree.get("format"), path)
        return cls(**parsed(CommitTree, tree, path).model_dump())


def check_tag(tag: object) -> str:
    """`tag` itself if it can name a folder and stand in `latest`. Raises CheckpointError otherwise."""
    if (
        not isinstance(tag, str)
        or tag != tag.strip()
        or tag in ("", LATEST)
        or tag.startswith(".")
        or not tag.isprintable()
        or set(tag) & set("/\\:")
    ):
        raise CheckpointError(
            f"{tag!r} cannot be a checkpoint's tag",
            hint="use a name like 'global_step100': printable, without / \\ :, not starting with '.', not 'latest'",
            value=tag,
        )
    return tag


def tag_names(storage: Storage) -> tuple[str, ...]:
    """Every folder that is or could become a checkpoint, complete or not, sorted."""
    return tuple(name for name in storage.names() if name != LATEST and storage.size(name) is None)


def read_commit(storage: Storage, tag: str) -> Commit | None:
    """The tag's commit marker; None if it has none, for it was never completed or does not exist."""
    path = f"{tag}/{MARKER}"
    nbytes = storage.size(path)
    return None if nbytes is None else Commit.from_bytes(storage.read(path, 0, min(nbytes, _MOST_NBYTES)), path)


def read_manifest(storage: Storage, commit: Commit) -> Manifest:
    """Read and verify the manifest that a marker names, and the lengths of this storage's files."""
    path = f"{commit.folder}/{MANIFEST}"
    _check_size(storage, path, commit.manifest_nbytes)
    data = storage.read(path, 0, commit.manifest_nbytes)
    if zlib.crc32(data) != commit.manifest_crc32:
        raise CheckpointError(f"{path} in {storage.location} is damaged: its checksum is wrong", value=path)
    manifest = Manifest.from_json(data, f"{path} in {storage.location}")
    manifest.check()
    if manifest.tag != commit.tag:
        raise CheckpointError(f"{path} in {storage.location} is of the checkpoint {manifest.tag!r}", value=path)
    expected = manifest.expected_at(place_id(storage)) if manifest.held else manifest.files
    for name, nbytes in expected.items():
        _check_size(storage, f"{commit.folder}/{name}", nbytes)
    return manifest


def write_commit(storage: Storage, commit: Commit) -> None:
    """Commit a checkpoint: replace the marker of its tag, which names this save from now on."""
    storage.write(f"{commit.tag}/{MARKER}", [commit.to_bytes()])


def read_latest(storage: Storage) -> str | None:
    """The tag that `latest` names; None if the file is missing. Raises CheckpointError for an impossible name."""
    nbytes = storage.size(LATEST)
    if nbytes is None:
        return None
    try:
        return check_tag(storage.read(LATEST, 0, min(nbytes, _MOST_NBYTES)).decode("utf-8").strip())
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{LATEST!r} in {storage.location} is damaged", hint="name a tag") from error


def write_latest(storage: Storage, tag: str) -> None:
    """Make `tag` the one to resume from."""
    storage.write(LATEST, [tag.encode("utf-8")])


def _check_size(storage: Storage, path: str, nbytes: int) -> None:
    found = storage.size(path)
    if found != nbytes:
        what = "is missing" if found is None else f"has {found:,} of {nbytes:,} bytes"
        raise CheckpointError(f"{path} in {storage.location} {what}", value=path)


def place_id(storage: Storage) -> str:
    """The identity of the place that `storage` is; empty where it has none."""
    found = read_note(storage).get("id")
    return found if isinstance(found, str) and _ID.fullmatch(found) else ""


def read_note(storage: Storage) -> dict[str, Any]:
    """Return the file's content; nothing where it is missing or not ours."""
    nbytes = storage.size(NOTE)
    if nbytes is None:
        return {}
    try:
        return json_object(storage.read(NOTE, 0, min(nbytes, _MOST_NOTE_NBYTES)), NOTE)
    except CheckpointError:  # no note of ours, which are whole
        return {}


def write_note(storage: Storage, identity: str, proof: str = "") -> None:
    """Give a storage an identity. `proof` is new each time that ranks want to see whether they see the same file."""
    note = {"id": identity, "host": socket.gethostname(), "proof": proof}
    storage.write(NOTE, [json.dumps(note).encode("ascii")])
