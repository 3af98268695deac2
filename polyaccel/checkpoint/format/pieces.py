"""A rank's part of a save: its `TensorPiece`s and blobs, and the file in which they are laid out.

[Note: Rank file layout]
A rank's file is a safetensors file, which every tool opens and frameworks map without a copy: each tensor starts on a
64-byte boundary. The format wants no gap between tensors, so what fills up is a tensor too, of uint8. All lengths are
fixed before the first byte is written, checksums are not: they stand in the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from polyaccel.checkpoint.format.manifest import BlobEntry
from polyaccel.checkpoint.format.tensors import PARAM, Piece, TensorEntry
from polyaccel.checkpoint.parsing import RankFileTree, parsed
from polyaccel.core.block import Block
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError
from polyaccel.ops.native import crc32

ALIGNMENT_NBYTES = 64
MAX_PIECE_NBYTES = 16 * 2**20
"""A longer run has several checksums, which bounds the memory for writing, reading and verifying it."""
SAFETENSORS_TYPES = {
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
class PieceSpec:
    """Elements [start, start + length) of the flattened `block` of a tensor, without one of the whole tensor.

    `kind` is "param", "master" or the name of an optimizer state; `shape` is that of the whole tensor.
    """

    fqn: str
    kind: str
    shape: tuple[int, ...]
    dtype: DType
    start: int
    length: int
    block: Block | None = None

    @property
    def nbytes(self) -> int:
        return self.length * self.dtype.itemsize

    @property
    def place(self) -> Block:
        """The block that the piece is a run of."""
        return self.block or Block.whole(self.shape)

    def check(self) -> None:
        """Raise CheckpointError unless the piece lies inside its tensor."""
        if self.place.shape != self.shape:
            raise CheckpointError(
                f"{self.fqn!r} ({self.kind}) has the shape {self.shape}, its block is one of a tensor of "
                f"{self.place.shape}",
                hint="`shape` is that of the whole tensor, and so is the block's",
                value=self.fqn,
            )
        if not 0 <= self.start <= self.start + self.length <= self.place.numel:
            raise CheckpointError(
                f"elements [{self.start}, {self.start + self.length}) are not inside {self.fqn!r} ({self.kind}) "
                f"of shape {self.place.local_shape}",
                hint="starts and lengths count elements of the flattened tensor, or of its block",
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


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A part of a tensor to save: `buffer` holds elements of it from `start` on, as in `PieceSpec`; `dtype` is the
    buffer's.

    Over all ranks, the pieces of a tensor cover it exactly once. A tensor without elements is represented by a piece
    without elements, on any number of ranks.
    """

    fqn: str
    kind: str
    shape: tuple[int, ...]
    dtype: DType
    start: int
    buffer: Buffer
    block: Block | None = None

    @property
    def spec(self) -> PieceSpec:
        """The piece without its values."""
        return PieceSpec(self.fqn, self.kind, tuple(self.shape), self.dtype, self.start, self.buffer.numel, self.block)

    def check(self) -> None:
        """Raise CheckpointError unless the piece is of its type and lies inside its tensor."""
        if self.buffer.dtype is not self.dtype:
            raise CheckpointError(
                f"{self.fqn!r} ({self.kind}) is declared {self.dtype.value}, its buffer is {self.buffer.dtype.value}",
                hint="state the type that is stored",
                value=self.fqn,
            )
        self.spec.check()


@dataclass(frozen=True, slots=True)
class FileSegment:
    """Bytes [offset, offset + nbytes) of a rank's file: a piece of a tensor, or the blob of that name."""

    offset: int
    nbytes: int
    content: PieceSpec | str


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A rank's file before it is written: `header`, then `segments` with what fills up between them; `nbytes` in
    all."""

    name: str
    header: bytes
    segments: tuple[FileSegment, ...]
    nbytes: int

    @classmethod
    def plan(cls, name: str, pieces: Sequence[PieceSpec], blobs: Mapping[str, int]) -> FileLayout:
        """Lay out the file `name`: first the pieces, then the blobs of these lengths."""
        tensors: dict[str, Any] = {"__metadata__": {"format": "polyaccel"}}
        placed, at = list[FileSegment](), 0

        def place(content: PieceSpec | str, stored: str, dtype: str, shape: Sequence[int], nbytes: int) -> None:
            nonlocal at
            if stored in tensors:
                raise CheckpointError(f"{stored!r} is given twice", hint="give each piece once", value=stored)
            tensors[stored] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
            placed.append(FileSegment(at, nbytes, content))
            at += nbytes
            if gap := -at % ALIGNMENT_NBYTES:
                tensors[f"__fill__{len(placed)}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [at, at + gap]}
                at += gap

        for piece in pieces:
            place(piece, piece.stored_name, SAFETENSORS_TYPES[piece.dtype], piece.stored_shape, piece.nbytes)
        for blob, nbytes in blobs.items():
            place(blob, f"__blob__{blob}", "U8", [nbytes], nbytes)
        header = json.dumps(tensors, separators=(",", ":")).encode("utf-8")
        header += b" " * (-(8 + len(header)) % ALIGNMENT_NBYTES)
        header = len(header).to_bytes(8, "little") + header
        segments = tuple(replace(segment, offset=len(header) + segment.offset) for segment in placed)
        return cls(name, header, segments, len(header) + at)


Read = Callable[[int, int, int], bytes | memoryview]
"""(number of a segment, first byte, nbytes) -> bytes of the segment."""


@dataclass
class RankFile:
    """A rank's file as it is written: the entries with the places of everything."""

    name: str
    nbytes: int = 0
    tensors: list[TensorEntry] = field(default_factory=list)
    blobs: list[BlobEntry] = field(default_factory=list)
    not_finite: str = ""
    """The first parameter with a value that is not finite; empty where there is none."""

    def chunks(self, layout: FileLayout, read: Read) -> Iterator[bytes | memoryview]:
        """The contents of the file of that `layout`, in order, which `read` gives piece by piece."""
        yield layout.header
        self.nbytes = len(layout.header)
        for number, segment in enumerate(layout.segments):
            yield self._fill(segment.offset)
            if isinstance(segment.content, str):
                yield from self._blob(segment.content, read(number, 0, segment.nbytes))
            else:
                yield from self._tensor(segment.content, partial(read, number))
        yield self._fill(layout.nbytes)

    def _blob(self, name: str, blob: bytes | memoryview) -> Iterator[bytes | memoryview]:
        self.blobs.append(BlobEntry(name, self.name, self.nbytes, len(blob), crc32(blob)))
        self.nbytes += len(blob)
        yield blob

    def _tensor(self, piece: PieceSpec, read: Callable[[int, int], bytes | memoryview]) -> Iterator[bytes | memoryview]:
        stored, size = [], piece.dtype.itemsize
        step = MAX_PIECE_NBYTES // size
        for first in range(0, piece.length, step):
            numel = min(step, piece.length - first)
            data = read(first * size, numel * size)
            if piece.kind == PARAM and not self.not_finite and not _is_finite(data, piece.dtype):
                self.not_finite = piece.fqn
            stored.append(Piece(piece.start + first, numel, self.name, self.nbytes, crc32(data), piece.block))
            self.nbytes += len(data)
            yield data
        self.tensors.append(TensorEntry(piece.fqn, piece.kind, piece.shape, piece.dtype, tuple(stored)))

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


def reading(contents: Sequence[TensorPiece | bytes]) -> Read:
    """Reads the segments of a file that was planned with these."""

    def read(number: int, first: int, nbytes: int) -> bytes | memoryview:
        content = contents[number]
        if isinstance(content, bytes):
            return content[first : first + nbytes]
        size = content.dtype.itemsize
        return content.buffer.view(first // size, nbytes // size).to_bytes()

    return read


def _is_finite(data: bytes | memoryview, dtype: DType) -> bool:
    if dtype is DType.BFLOAT16:  # which numpy does not have: all bits of the exponent are set
        return not bool(((np.frombuffer(data, np.uint16) & 0x7F80) == 0x7F80).any())
    return not dtype.is_floating or bool(np.isfinite(np.frombuffer(data, dtype.value)).all())
