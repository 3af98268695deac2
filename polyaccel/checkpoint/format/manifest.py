"""The manifest: the contents of a checkpoint, in coordinates that no world size, mesh, bucket size or framework has a
part in."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import Any

from polyaccel.checkpoint.format.tensors import TensorEntry
from polyaccel.checkpoint.parsing import ManifestTree, json_object, not_understood, parsed
from polyaccel.core import tagged_json
from polyaccel.errors import CheckpointError

FORMAT = (2, 0)
"""Version of the format on disk. A newer major cannot be read; a newer minor only adds fields, which are ignored.

1.1 added the manifest's `digest`: the SHA-256 of its JSON without it, as `_digest` writes that. With 2.0 rank files are
safetensors files, tensors may have `blocks`, and `about` describes the run that saved.
"""
_READABLE = (1, FORMAT[0])


@dataclass(frozen=True, slots=True)
class BlobEntry:
    """A rank's own bytes under `name`, for example its random-number state: `nbytes` bytes at byte `offset` of
    `file`."""

    name: str
    file: str
    offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """One complete checkpoint.

    `files` gives the length in bytes of each file, `scalars` a tree of plain values, and `blobs[rank]` the bytes
    that rank `rank` of the `world_size` saving ranks saved for itself.
    """

    tag: str
    world_size: int
    files: dict[str, int]
    tensors: tuple[TensorEntry, ...]
    scalars: dict[str, Any] = field(default_factory=dict)
    blobs: tuple[tuple[BlobEntry, ...], ...] = ()
    not_finite: str = ""
    """The first parameter with a value that is not finite; empty where there is none."""
    about: dict[str, Any] = field(default_factory=dict)
    """The run that saved, for people and for later versions: plain values."""
    held: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """Where hosts have separate storages: for each file the (id, name) of the places that have it."""

    @cached_property
    def by_name(self) -> dict[tuple[str, str], TensorEntry]:
        """Every tensor by (fqn, kind)."""
        return {(tensor.fqn, tensor.kind): tensor for tensor in self.tensors}

    @property
    def nbytes(self) -> int:
        """Length of all files but the manifest itself."""
        return sum(self.files.values())

    def check(self) -> None:
        """Raise CheckpointError unless every tensor is tiled, once, by pieces inside their files that share no byte."""
        if len(self.by_name) != len(self.tensors):
            raise CheckpointError(f"the manifest of {self.tag!r} lists a tensor twice", value=self.tag)
        if len(self.blobs) != self.world_size:
            raise CheckpointError(
                f"the manifest of {self.tag!r} has states of {len(self.blobs)} ranks, saved by {self.world_size}",
                hint="load another tag",
                value=self.tag,
            )
        shapes: dict[str, TensorEntry] = {}
        taken: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for tensor in self.tensors:
            tensor.check_tiling()
            name = f"{tensor.fqn!r} ({tensor.kind})"
            first = shapes.setdefault(tensor.fqn, tensor)
            if tensor.shape != first.shape:
                raise CheckpointError(
                    f"the manifest of {self.tag!r} has {name} in the shape {tensor.shape}, and its {first.kind} in "
                    f"{first.shape}",
                    hint="load another tag",
                    value=tensor.fqn,
                )
            for piece in tensor.pieces:
                nbytes = piece.length * tensor.dtype.itemsize
                self._check_inside(name, piece.file, piece.offset, nbytes)
                taken[piece.file].append((piece.offset, piece.offset + nbytes, name))
        for rank, blobs in enumerate(self.blobs):
            for blob in blobs:
                name = f"{blob.name!r} of rank {rank}"
                self._check_inside(name, blob.file, blob.offset, blob.nbytes)
                taken[blob.file].append((blob.offset, blob.offset + blob.nbytes, name))
        for file, runs in taken.items():
            for (_, end, one), (start, _, other) in pairwise(sorted(run for run in runs if run[0] < run[1])):
                if start < end:
                    raise CheckpointError(
                        f"bytes [{start}, {end}) of {file} should hold both {one} and {other}",
                        hint="the checkpoint was not written by a correct writer: load another tag",
                        value=file,
                    )

    def expected_at(self, place: str) -> dict[str, int]:
        """The files, with their lengths, that the place of that id has; all of them where it is none that is named."""
        if not any(place == found for places in self.held.values() for found, _ in places):
            return self.files
        return {
            name: nbytes
            for name, nbytes in self.files.items()
            if name not in self.held or any(place == found for found, _ in self.held[name])
        }

    def _check_inside(self, name: str, file: str, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.files.get(file, -1):
            raise CheckpointError(
                f"bytes [{offset}, {offset + nbytes}) of {file}, which should hold {name}, lie outside that file",
                hint="the checkpoint was not written by a correct writer: load another tag",
                value=file,
            )

    def to_json(self) -> bytes:
        """One line of ASCII. Equal manifests give equal bytes."""
        tree = {
            "format": FORMAT,
            "tag": self.tag,
            "world_size": self.world_size,
            "files": dict(sorted(self.files.items())),
            "tensors": [tensor.to_tree() for tensor in self.tensors],
            "scalars": encode_plain(self.scalars, "scalars"),
            "blobs": [
                {blob.name: [blob.file, blob.offset, blob.nbytes, blob.crc32] for blob in blobs} for blobs in self.blobs
            ],
        }
        if self.not_finite:
            tree["not_finite"] = self.not_finite
        if self.held:
            tree["held"] = self.held
        if self.about:
            tree["about"] = encode_plain(self.about, "about")
        return _json({**tree, "digest": _digest(tree)})

    @classmethod
    def from_json(cls, data: bytes, what: str = "the manifest") -> Manifest:
        """Parse and verify a manifest; errors name it `what`."""
        tree = json_object(data, what)
        version = check_format(tree.get("format"), what)
        digest = tree.pop("digest", None)
        try:
            is_original = digest == _digest(tree) if digest is not None else version == (1, 0)
        except (ValueError, RecursionError) as error:  # of what `json` reads and would not write
            raise not_understood(what, f"{type(error).__name__}: {error}") from error
        if not is_original:
            raise CheckpointError(
                f"{what} was changed after it was written: its digest is another", hint="load another tag", value=what
            )
        checked = parsed(ManifestTree, tree, what)
        scalars, about = decode_plain(checked.scalars), decode_plain(checked.about)
        if not isinstance(scalars, dict):
            raise not_understood(what, f"its scalars are a {type(scalars).__name__}")
        return cls(
            tag=checked.tag,
            world_size=checked.world_size,
            files=checked.files,
            tensors=tuple(TensorEntry.from_tree(tensor) for tensor in checked.tensors),
            scalars=scalars,
            blobs=tuple(tuple(BlobEntry(name, *rest) for name, rest in rank.items()) for rank in checked.blobs),
            not_finite=checked.not_finite,
            about=about if isinstance(about, dict) else {},
            held=checked.held,
        )


def check_format(version: Any, what: str) -> tuple[int, int]:
    """`version`, the [major, minor] that `what` states. Raises CheckpointError when it cannot be read here."""
    match version:
        case [int(major), int(minor)] if major in _READABLE and minor >= 0:
            return major, minor
        case None:
            raise not_understood(what, "it states no format")
    majors = " and ".join(f"{major}.x" for major in _READABLE)
    raise CheckpointError(
        f"{what} has format {version!r:.100}, this version of polyaccel reads {majors}",
        hint="load it with a version of polyaccel that supports this format",
        value=version,
    )


def _json(tree: dict[str, Any]) -> bytes:
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode("ascii")


def _digest(tree: dict[str, Any]) -> str:
    return sha256(_json(tree)).hexdigest()


def encode_plain(value: Any, where: str) -> Any:
    """`plain.to_tree`. Raises CheckpointError, naming the dotted key and the type, for anything but plain values."""
    try:
        return tagged_json.encode(value, where)
    except tagged_json.SerializationError as error:
        raise CheckpointError(
            f"a checkpoint cannot hold this: {error.message}", hint=error.hint, value=error.value
        ) from error


def decode_plain(tree: Any) -> Any:
    """The inverse of `encode_plain`. Raises CheckpointError for a tree that it does not make."""
    try:
        return tagged_json.decode(tree)
    except tagged_json.SerializationError as error:
        raise CheckpointError(
            f"the manifest holds {error.message}", hint=error.hint or "load another tag", value=error.value
        ) from error
