"""A rank's part of a save: its `TensorPiece`s and blobs, and the file in which they are laid out.

[Note: Rank files]
A rank's file is a safetensors file, which every tool opens and frameworks map without a copy: each tensor starts on a
64-byte boundary. The format wants no gap between tensors, so what fills up is a tensor too, of uint8. All lengths are
known before the first byte is written, checksums are not: they stand in the manifest.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polyaccel.buffer import Buffer
from polyaccel.checkpoint.manifest import BlobEntry
from polyaccel.checkpoint.parsing import RankFileTree, parsed
from polyaccel.checkpoint.tensors import PARAM, Piece, TensorEntry
from polyaccel.errors import CheckpointError
from polyaccel.mesh.block import Block
from polyaccel.types import DType

ALIGNMENT_NBYTES = 64
MAX_PIECE_NBYTES = 16 * 2**20
"""A longer run has several checksums, which bounds the memory for writing, reading and verifying it."""
_NAMES = {
    DType.FLOAT64: "F64",
    DType.FLOAT32: "F32",
    DType.BFLOAT16: "BF16",
    DType.FLOAT16: "F16",
    DType.INT64: "I64",
    DType.INT32: "I32",
    DType.INT16: "I16",
    DType.INT8: "I8",
    DType.UINT8: "U8",
    DType.BOOL: "BOOL",
}
"""What safetensors calls the types."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A part of a tensor to save: `buffer` holds elements [start, start + buffer.numel) of the flattened `block` of the
    tensor, without one of the whole tensor.

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
    block: Block | None = None

    @property
    def length(self) -> int:
        return self.buffer.numel

    @property
    def place(self) -> Block:
        """The block that the piece is a run of."""
        return self.block or Block.whole(self.shape)

    def check(self) -> None:
        """Raise CheckpointError unless the piece is of its type and lies inside its tensor."""
        if self.buffer.dtype is not self.dtype:
            raise CheckpointError(
                f"{self.fqn!r} ({self.kind}) is said to be {self.dtype.value}, its buffer is {self.buffer.dtype.value}",
                cure="state the type that is stored",
                value=self.fqn,
            )
        if self.place.shape != tuple(self.shape):
            raise CheckpointError(
                f"{self.fqn!r} ({self.kind}) has the shape {self.shape}, its block is one of a tensor of "
                f"{self.place.shape}",
                cure="`shape` is that of the whole tensor, and so is the block's",
                value=self.fqn,
            )
        if not 0 <= self.start <= self.start + self.length <= self.place.numel:
            raise CheckpointError(
                f"elements [{self.start}, {self.start + self.length}) are not inside {self.fqn!r} ({self.kind}) "
                f"of shape {self.place.local_shape}",
                cure="starts and lengths count elements of the flattened tensor, or of its block",
                value=self.fqn,
            )

    @property
    def stored_name(self) -> str:
        """The name in a safetensors file: that of the tensor, and the part of it that this is."""
        name = f"{self.fqn}:{self.kind}"
        if self.block is not None:
            name += "@" + ",".join("+".join(f"{at}:{at + count}" for at, count in runs) for runs in self.block.runs)
        is_all = self.length == self.place.numel
        return name if is_all else f"{name}[{self.start}:{self.start + self.length}]"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in a safetensors file: flat where it is not the whole block."""
        return self.place.local_shape if self.length == self.place.numel else (self.length,)


@dataclass(frozen=True)
class FileLayout:
    """A rank's file before it is written: `header`, then at `offsets` the pieces, then the blobs; `nbytes` in all."""

    name: str
    header: bytes
    pieces: Sequence[TensorPiece]
    blobs: Mapping[str, bytes]
    offsets: Sequence[int]
    nbytes: int

    @classmethod
    def plan(cls, name: str, pieces: Sequence[TensorPiece], blobs: Mapping[str, bytes]) -> FileLayout:
        """Lay out the file `name`. Raises CheckpointError for a piece that is given twice."""
        tensors: dict[str, Any] = {"__metadata__": {"format": "polyaccel"}}
        starts, at = list[int](), 0

        def place(stored: str, dtype: str, shape: Sequence[int], nbytes: int) -> None:
            nonlocal at
            if stored in tensors:
                raise CheckpointError(f"{stored!r} is given twice", cure="give each piece once", value=stored)
            tensors[stored] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
            starts.append(at)
            at += nbytes
            if gap := -at % ALIGNMENT_NBYTES:
                tensors[f"__fill__{len(starts)}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [at, at + gap]}
                at += gap

        for piece in pieces:
            place(piece.stored_name, _NAMES[piece.dtype], piece.stored_shape, piece.buffer.nbytes)
        for blob, data in blobs.items():
            place(f"__blob__{blob}", "U8", [len(data)], len(data))
        header = json.dumps(tensors, separators=(",", ":")).encode("utf-8")
        header += b" " * (-(8 + len(header)) % ALIGNMENT_NBYTES)
        header = len(header).to_bytes(8, "little") + header
        return cls(name, header, pieces, blobs, [len(header) + start for start in starts], len(header) + at)


@dataclass
class RankFile:
    """A rank's file as it is written: the entries that say where everything went."""

    name: str
    nbytes: int = 0
    tensors: list[TensorEntry] = field(default_factory=list)
    blobs: list[BlobEntry] = field(default_factory=list)
    not_finite: str = ""
    """The first parameter with a value that is not finite; empty where there is none."""

    def chunks(self, layout: FileLayout, read: Callable[[TensorPiece, int, int], bytes]) -> Iterator[bytes]:
        """The contents of the file of that `layout`, in order. `read(piece, offset, numel)` gives elements of a piece,
        counted from its first."""
        yield layout.header
        self.nbytes = len(layout.header)
        offsets = iter(layout.offsets)
        for piece in layout.pieces:
            yield self._fill(next(offsets))
            stored = []
            for offset, numel in _cut(piece):
                data = read(piece, offset, numel)
                if piece.kind == PARAM and not self.not_finite and not _is_finite(data, piece.dtype):
                    self.not_finite = piece.fqn
                crc32 = zlib.crc32(data)
                stored.append(Piece(piece.start + offset, numel, self.name, self.nbytes, crc32, piece.block))
                self.nbytes += len(data)
                yield data
            self.tensors.append(TensorEntry(piece.fqn, piece.kind, tuple(piece.shape), piece.dtype, tuple(stored)))
        for name, blob in layout.blobs.items():
            yield self._fill(next(offsets))
            self.blobs.append(BlobEntry(name, self.name, self.nbytes, len(blob), zlib.crc32(blob)))
            self.nbytes += len(blob)
            yield blob
        yield self._fill(layout.nbytes)

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

    def _fill(self, offset: int) -> bytes:
        padding = bytes(offset - self.nbytes)
        self.nbytes = offset
        return padding


def read_piece(piece: TensorPiece, offset: int, numel: int) -> bytes:
    """Elements of a piece from its own buffer."""
    return piece.buffer.view(offset, numel).to_bytes()


def _is_finite(data: bytes, dtype: DType) -> bool:
    if dtype is DType.BFLOAT16:  # which numpy does not know: all bits of the exponent are set
        return not bool(((np.frombuffer(data, np.uint16) & 0x7F80) == 0x7F80).any())
    return not dtype.is_floating or bool(np.isfinite(np.frombuffer(data, dtype.value)).all())


def _cut(piece: TensorPiece) -> Iterator[tuple[int, int]]:
    """The piece as (offset, numel) of at most MAX_PIECE_NBYTES each; none if it has no elements."""
    step = MAX_PIECE_NBYTES // piece.dtype.itemsize
    for offset in range(0, piece.length, step):
        yield offset, min(step, piece.length - offset)
