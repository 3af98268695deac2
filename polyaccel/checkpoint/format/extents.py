"""The byte ranges of a save that have a checksum: pieces of tensors and blobs, numbered the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from polyaccel.checkpoint.format.manifest import BlobEntry, Manifest
from polyaccel.checkpoint.format.tensors import Piece, TensorEntry
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.errors import CheckpointError
from polyaccel.ops.native import crc32 as checksum


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [offset, offset + nbytes) of `file`; `name` describes in messages what they hold."""

    file: str
    offset: int
    nbytes: int
    crc32: int
    name: str

    @classmethod
    def of_piece(cls, tensor: TensorEntry, piece: Piece) -> Extent:
        """The extent that a piece of a tensor is stored in."""
        name = f"elements {piece.elements} of {tensor.fqn!r} ({tensor.kind})"
        return cls(piece.file, piece.offset, piece.length * tensor.dtype.itemsize, piece.crc32, name)

    @classmethod
    def of_blob(cls, blob: BlobEntry, rank: int) -> Extent:
        """The extent that a blob of the saving rank `rank` is stored in."""
        return cls(blob.file, blob.offset, blob.nbytes, blob.crc32, f"{blob.name!r} of rank {rank}")

    @property
    def key(self) -> tuple[str, int]:
        """Return what distinguishes extents that have bytes: no two share a byte."""
        return self.file, self.offset

    def read(self, storage: Storage, folder: str) -> bytes:
        """The bytes, from the save in `folder`, verified. Raises CheckpointError."""
        data = storage.read(f"{folder}/{self.file}", self.offset, self.nbytes)
        self.check(data, folder, storage.location)
        return data

    def read_into(self, storage: Storage, folder: str, target: memoryview) -> None:
        """As `read`, into `target`."""
        storage.read_into(f"{folder}/{self.file}", self.offset, target)
        self.check(target, folder, storage.location)

    def check(self, data: bytes | memoryview, folder: str, location: str) -> None:
        """Raise CheckpointError, naming file, bytes and contents, if `data` has another checksum."""
        path = f"{folder}/{self.file}"
        if (found := checksum(data)) != self.crc32:
            raise CheckpointError(
                f"{path} in {location} is damaged: bytes [{self.offset}, {self.offset + self.nbytes}), "
                f"which hold {self.name}, have the crc32 {found:08x} and not {self.crc32:08x}",
                hint="load another tag",
                value=path,
            )


class ExtentTable:
    """Extents that have bytes, by number and by key."""

    def __init__(self, extents: Iterator[Extent]) -> None:
        self.extents = tuple(extent for extent in extents if extent.nbytes)

    @classmethod
    def of_tensors(cls, manifest: Manifest) -> ExtentTable:
        """Those of all tensors, in the manifest's order."""
        return cls(Extent.of_piece(tensor, piece) for tensor in manifest.tensors for piece in tensor.pieces)

    @classmethod
    def of_blobs(cls, manifest: Manifest) -> ExtentTable:
        """Those of all ranks' blobs, rank by rank."""
        return cls(Extent.of_blob(blob, rank) for rank, blobs in enumerate(manifest.blobs) for blob in blobs)

    @cached_property
    def number_of(self) -> dict[tuple[str, int], int]:
        """The number of each extent, by its key."""
        return {extent.key: number for number, extent in enumerate(self.extents)}


@dataclass(frozen=True)
class FileLocations:
    """Which rank sees which files of a save. Ranks of one place see the same ones.

    `places[r]` is the place of rank r, `names[p]` what people call place p, `files[p]` what it has; None where all
    ranks see one storage, which is place 0.
    """

    places: tuple[int, ...]
    names: tuple[str, ...] = ("",)
    files: tuple[frozenset[str], ...] | None = None

    @classmethod
    def shared(cls, world_size: int) -> FileLocations:
        """Those of a storage that all ranks see."""
        return cls((0,) * world_size)

    def having(self, file: str) -> tuple[int, ...]:
        """The places that have a file."""
        if self.files is None:
            return (0,)
        return tuple(place for place, files in enumerate(self.files) if file in files)
