"""A tensor in a checkpoint, and the pieces of files that it is stored as.

A tensor is named by its parameter's `fqn` and a `kind` ("param", or the name of an optimizer state). A piece is a run
of a *block* of it (`polyaccel.core.block`), of the whole tensor where no rank held less. The pieces of a tensor tile
it: every element is in exactly one. Starts and lengths count elements, offsets count bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

from polyaccel.checkpoint.parsing import RunsTree, TensorTree
from polyaccel.core.block import Block, Copy, Run, are_disjoint, overlaps
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError, ShardingError

PARAM = "param"
"""The kind of the tensors that are parameters."""
BUFFER = "buffer"
"""The kind of the tensors that are a module's persistent buffers."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, start + length) of a flattened block of a tensor (None: of the whole tensor), at byte `offset`
    of `file`. `crc32` is zlib's, over those bytes."""

    start: int
    length: int
    file: str
    offset: int
    crc32: int
    block: Block | None = None

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def elements(self) -> str:
        """The piece's elements in messages."""
        of_block = "" if self.block is None else f" of the block {_named(self.block)}"
        return f"[{self.start}, {self.end}){of_block}"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor and where its pieces are: block by block, within a block sorted by `start`. `shape` is that of the whole
    tensor. One without elements has no pieces."""

    fqn: str
    kind: str
    shape: tuple[int, ...]
    dtype: DType
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_cut(self) -> bool:
        """Whether ranks stored blocks of it that are not the whole."""
        return any(piece.block is not None for piece in self.pieces)

    def touched(self, block: Block | None, start: int, length: int) -> Iterator[tuple[Piece, tuple[Copy, ...]]]:
        """Yield the pieces that hold the range of `block` (None: whole tensor), with the copies that bring it there."""
        wanted, whole, run = block or Block.whole(self.shape), Block.whole(self.shape), (start, length)
        for piece in self.pieces:
            copies = tuple(overlaps(piece.block or whole, (piece.start, piece.length), wanted, run))
            if copies:
                yield piece, copies

    def to_tree(self) -> dict[str, Any]:
        """The entry as a manifest has it: JSON's values only."""
        tree: dict[str, Any] = {
            "fqn": self.fqn,
            "kind": self.kind,
            "shape": list(self.shape),
            "dtype": self.dtype.value,
            "pieces": [_piece_tree(piece) for piece in self.pieces if piece.block is None],
        }
        cut = [piece for piece in self.pieces if piece.block is not None]
        if cut:
            tree["blocks"] = [
                [[[list(run) for run in runs] for runs in block.runs], [_piece_tree(piece) for piece in pieces]]
                for block, pieces in groupby(cut, key=lambda piece: piece.block)
                if block is not None
            ]
        return tree

    @classmethod
    def from_tree(cls, tree: TensorTree) -> TensorEntry:
        """The inverse of `to_tree`, once that has been parsed. Raises CheckpointError for blocks that are none."""
        pieces = [Piece(*piece) for piece in tree.pieces]
        for runs, of_block in tree.blocks:
            block = _block(tree, runs)
            pieces += [Piece(*piece, block) for piece in of_block]
        return cls(tree.fqn, tree.kind, tree.shape, tree.dtype, tuple(pieces))

    def check_tiling(self) -> None:
        """Raise CheckpointError, naming the tensor and the elements, unless every element is in exactly one piece."""
        stored = list[Block]()
        for block, pieces in groupby(self.pieces, key=lambda piece: piece.block):
            stored.append(block or Block.whole(self.shape))
            self._check_run(block, stored[-1].numel, pieces)
        if not stored:
            self._check_run(None, self.numel, ())
        if len(stored) > 1 and not are_disjoint(stored):
            raise self._tiling_error("holds some elements in two blocks")
        reached = sum(block.numel for block in stored)
        if stored and reached < self.numel:
            raise self._tiling_error(f"misses {self.numel - reached} of {self.numel} elements")

    def _check_run(self, block: Block | None, numel: int, pieces: Iterable[Piece]) -> None:
        of_block = "" if block is None else f" of the block {_named(block)}"
        reached = 0
        for piece in pieces:
            if piece.length < 1 or piece.start > reached:
                raise self._tiling_error(f"misses elements [{reached}, {piece.start}){of_block}")
            if piece.start < reached:
                again = min(reached, piece.end)
                raise self._tiling_error(f"holds elements [{piece.start}, {again}){of_block} twice")
            reached = piece.end
        if reached < numel:
            raise self._tiling_error(f"misses elements [{reached}, {numel}){of_block}")
        if reached > numel:
            shape = self.shape if block is None else block.local_shape
            raise self._tiling_error(f"holds elements [{numel}, {reached}){of_block}, which its shape {shape} has not")

    def _tiling_error(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {what} of {self.fqn!r} ({self.kind})",
            hint="when saving: every element belongs to one rank's pieces; when loading: use another tag",
            value=(self.fqn, self.kind),
        )


def build_tensors(found: Iterable[tuple[int, TensorEntry]]) -> tuple[TensorEntry, ...]:
    """Join the parts of each tensor, given as (rank, entry); sorted by name."""
    parts: dict[tuple[str, str], list[tuple[int, TensorEntry]]] = {}
    for rank, entry in found:
        parts.setdefault((entry.fqn, entry.kind), []).append((rank, entry))
    return tuple(_join(parts[name]) for name in sorted(parts))


def _join(parts: list[tuple[int, TensorEntry]]) -> TensorEntry:
    first_rank, first = parts[0]
    for rank, other in parts[1:]:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{first.fqn!r} ({first.kind}) is {first.dtype.value}{list(first.shape)} on rank {first_rank} "
                f"but {other.dtype.value}{list(other.shape)} on rank {rank}",
                hint="build the same model on every rank",
                value=first.fqn,
            )
    pieces = sorted((piece for _, entry in parts for piece in entry.pieces), key=_order)
    return TensorEntry(first.fqn, first.kind, first.shape, first.dtype, tuple(pieces))


def _order(piece: Piece) -> tuple[tuple[tuple[Run, ...], ...], int]:
    return (() if piece.block is None else piece.block.runs), piece.start


def _piece_tree(piece: Piece) -> list[Any]:
    return [piece.start, piece.length, piece.file, piece.offset, piece.crc32]


def _block(tree: TensorTree, runs: RunsTree) -> Block:
    try:
        return Block(tree.shape, runs)
    except ShardingError as error:
        raise CheckpointError(
            f"the manifest has a block of {tree.fqn!r} ({tree.kind}) that is none: {error.message}",
            hint="load another tag",
            value=tree.fqn,
        ) from error


def _named(block: Block) -> str:
    return "[" + ", ".join("+".join(f"{start}:{start + count}" for start, count in runs) for runs in block.runs) + "]"
