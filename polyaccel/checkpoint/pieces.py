"""A rank's part of a save: its `TensorPiece`s, and the file in which they and its blobs are laid out."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from polyaccel.buffer import Buffer
from polyaccel.checkpoint.manifest import PARAM, BlobEntry, Piece, TensorEntry
from polyaccel.checkpoint.parsing import RankFileTree, parsed
from polyaccel.errors import CheckpointError
from polyaccel.types import DType

PIECE_ALIGNMENT_NBYTES = 64
MAX_PIECE_NBYTES = 16 * 2**20
"""Longer runs are stored as several pieces, which bounds the memory for writing, reading and verifying them."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A part of a tensor to save: `buffer` holds elements [start, start + buffer.numel) of the flattened tensor.

    `kind` is "param", "master" or the name of an optimizer state; `shape` is that of the whole tensor; `dtype` is the
    buffer's. Over all ranks, the pieces of a tensor cover it exactly once. A tensor without elements is made known by
    a piece without elements, on any number of ranks.
    """

    fqn: str
    kind: str
    shape: tuple[int, ...]
    dtype: DType
    start: int
    buffer: Buffer

    @property
    def length(self) -> int:
        return self.buffer.numel

    def check(self) -> None:
        """Raise CheckpointError unless the piece is of its type and lies inside its tensor."""
        if self.buffer.dtype is not self.dtype:
            raise CheckpointError(
                f"{self.fqn!r} ({self.kind}) is said to be {self.dtype.value}, its buffer is {self.buffer.dtype.value}",
                cure="state the type that is stored",
                value=self.fqn,
            )
        if not 0 <= self.start <= self.start + self.length <= prod(self.shape):
            raise CheckpointError(
                f"elements [{self.start}, {self.start + self.length}) are not inside {self.fqn!r} ({self.kind}) "
                f"of shape {self.shape}",
                cure="starts and lengths count elements of the whole flattened tensor",
                value=self.fqn,
            )


@dataclass
class RankFile:
    """A rank's file as it is written: the chunks that go into it, and the entries that say where everything went."""

    name: str
    nbytes: int = 0
    tensors: list[TensorEntry] = field(default_factory=list)
    blobs: list[BlobEntry] = field(default_factory=list)
    not_finite: str = ""
    """The first parameter with a value that is not finite; empty where there is none."""

    def chunks(self, pieces: Iterable[TensorPiece], rank_blobs: Mapping[str, bytes]) -> Iterator[bytes]:
        """The file's contents, in order."""
        for piece in pieces:
            stored = []
            for start, part in _cut(piece):
                data = part.to_bytes()
                if piece.kind == PARAM and not self.not_finite and not _is_finite(data, piece.dtype):
                    self.not_finite = piece.fqn
                yield self._padding()
                stored.append(Piece(start, part.numel, self.name, self.nbytes, zlib.crc32(data)))
                self.nbytes += len(data)
                yield data
            self.tensors.append(TensorEntry(piece.fqn, piece.kind, tuple(piece.shape), piece.dtype, tuple(stored)))
        for name, blob in rank_blobs.items():
            yield self._padding()
            self.blobs.append(BlobEntry(name, self.name, self.nbytes, len(blob), zlib.crc32(blob)))
            self.nbytes += len(blob)
            yield blob

    def to_tree(self) -> dict[str, Any]:
        """The name, length and entries as plain values: what rank 0 needs for the manifest."""
        blobs = [[blob.name, blob.file, blob.offset, blob.nbytes, blob.crc32] for blob in self.blobs]
        return {
            "name": self.name,
            "nbytes": self.nbytes,
            "tensors": [entry.to_tree() for entry in self.tensors],
            "blobs": blobs,
            "not_finite": self.not_finite,
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any], what: str) -> RankFile:
        """The inverse of `to_tree`. Raises CheckpointError, naming `what`, for any other tree."""
        checked = parsed(RankFileTree, tree, what)
        tensors = [TensorEntry.from_tree(entry) for entry in checked.tensors]
        blobs = [BlobEntry(*blob) for blob in checked.blobs]
        return cls(checked.name, checked.nbytes, tensors, blobs, checked.not_finite)

    def _padding(self) -> bytes:
        padding = bytes(-self.nbytes % PIECE_ALIGNMENT_NBYTES)
        self.nbytes += len(padding)
        return padding


def _is_finite(data: bytes, dtype: DType) -> bool:
    if dtype is DType.BFLOAT16:  # which numpy does not know: all bits of the exponent are set
        return not bool(((np.frombuffer(data, np.uint16) & 0x7F80) == 0x7F80).any())
    return not dtype.is_floating or bool(np.isfinite(np.frombuffer(data, dtype.value)).all())


def _cut(piece: TensorPiece) -> Iterator[tuple[int, Buffer]]:
    """The piece as (start, buffer) of at most MAX_PIECE_NBYTES each; none if it has no elements."""
    step = MAX_PIECE_NBYTES // piece.dtype.itemsize
    for offset in range(0, piece.length, step):
        length = min(step, piece.length - offset)
        yield piece.start + offset, piece.buffer.view(offset, length)
