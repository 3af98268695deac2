"""Where a rank's block of a parameter stands in the global tensor. Integers only.

A rank that holds a part of a tensor (tensor and expert parallelism cut along tensor dimensions, a stack of layers along
its first one) holds a *block*: along every dimension some runs of the global indices, one after the other. One run is a
plain cut; several are a fused weight, such as the query, key and value rows of some heads. ZeRO shards the flattened
block on, so what a rank stores or reads is a *run of a block*: elements [start, start + length) of it.

Two runs of two blocks of one tensor share boxes: products of intervals. `overlaps` gives them as copies between strided
views of the two runs, which is all that resharding takes, from any cut to any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from polyaccel.errors import ShardingError

Run = tuple[int, int]
"""(start, length) in global indices of one dimension."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a tensor of the global `shape`: along dimension d it has the indices of `runs[d]`, run after run.

    Raises ShardingError for runs that lie outside of the tensor or share an index.
    """

    shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]

    def __post_init__(self) -> None:
        if len(self.runs) != len(self.shape):
            raise ShardingError(
                f"a block with runs along {len(self.runs)} dimensions is not a part of a tensor of {len(self.shape)}",
                value=self.runs,
            )
        for dim, (length, runs) in enumerate(zip(self.shape, self.runs, strict=True)):
            reached = 0
            for start, count in sorted(runs):
                if count < 0 or start < reached or start + count > length:
                    raise ShardingError(
                        f"runs {runs} of dimension {dim} share an index or lie outside of its {length}",
                        hint="a run is (start, length) in global indices",
                        value=runs,
                    )
                reached = start + count

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Block:
        """The block that is the whole tensor."""
        return cls(tuple(shape), tuple(((0, length),) for length in shape))

    def cut(self, dim: int, *runs: Run) -> Block:
        """This block with `runs` of dimension `dim`, in global indices."""
        return Block(self.shape, (*self.runs[:dim], runs, *self.runs[dim + 1 :]))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the block as its rank holds it."""
        return tuple(sum(count for _, count in runs) for runs in self.runs)

    @property
    def numel(self) -> int:
        return prod(self.local_shape)

    @property
    def is_whole(self) -> bool:
        """Whether the block is the whole tensor in its own order."""
        return all(runs == ((0, length),) for length, runs in zip(self.shape, self.runs, strict=True))

    def boxes(self, start: int, length: int) -> Iterator[Box]:
        """Elements [start, start + length) of the flattened block as boxes of the tensor that share none."""
        shape = self.local_shape
        strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        for corner, extent in _flat_boxes(shape, start, start + length):
            sides = [_global_sides(*each) for each in zip(self.runs, corner, extent, strict=True)]
            for side in product(*sides):
                at = sum(local * stride for (_, local, _), stride in zip(side, strides, strict=True))
                yield Box(tuple(first for first, _, _ in side), tuple(n for _, _, n in side), at - start, strides)


class Box(NamedTuple):
    """A product of intervals of a tensor: its first indices, its lengths, and where it lies in the memory of a run: the
    first element at `offset`, neighbours along dimension d `strides[d]` elements apart."""

    corner: tuple[int, ...]
    lengths: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


class Copy(NamedTuple):
    """Elements that two runs share: an array of `lengths`, in the memory of each at an offset and with strides, both in
    elements."""

    lengths: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]


def overlaps(source: Block, source_run: Run, target: Block, target_run: Run) -> Iterator[Copy]:
    """Return what a range of block `source` shares with block `target` of one tensor, each element once."""
    if source == target:
        low = max(source_run[0], target_run[0])
        high = min(sum(source_run), sum(target_run))
        if low < high:
            yield Copy((high - low,), low - source_run[0], (1,), low - target_run[0], (1,))
        return
    theirs = list(target.boxes(*target_run))
    for box in source.boxes(*source_run):
        for other in theirs:
            shared = _intersection(box, other)
            if shared is not None:
                yield shared


def are_disjoint(blocks: Sequence[Block]) -> bool:
    """Whether no two blocks of a tensor share an element."""
    boxes = [box for block in blocks for box in block.boxes(0, block.numel)]
    boxes.sort(key=lambda box: box.corner)
    for index, one in enumerate(boxes):
        end = one.corner[0] + one.lengths[0] if one.corner else 1
        for other in boxes[index + 1 :]:
            if other.corner and other.corner[0] >= end:
                break
            if _intersection(one, other) is not None:
                return False
    return True


def _intersection(one: Box, other: Box) -> Copy | None:
    corner = tuple(map(max, one.corner, other.corner))
    lengths = tuple(
        min(a + m, b + n) - first
        for a, m, b, n, first in zip(one.corner, one.lengths, other.corner, other.lengths, corner, strict=True)
    )
    if any(length <= 0 for length in lengths):
        return None
    return Copy(lengths, _at(one, corner), one.strides, _at(other, corner), other.strides)


def _at(box: Box, corner: tuple[int, ...]) -> int:
    """Where the element with the global indices `corner` lies in the memory of the box's run."""
    steps = zip(corner, box.corner, box.strides, strict=True)
    return box.offset + sum((index - first) * stride for index, first, stride in steps)


def _global_sides(runs: tuple[Run, ...], first: int, count: int) -> list[tuple[int, int, int]]:
    """Local indices [first, first + count) of one dimension as (global start, local start, length), run by run."""
    sides, local = [], 0
    for start, length in runs:
        low, high = max(first, local), min(first + count, local + length)
        if low < high:
            sides.append((start + low - local, low, high - low))
        local += length
    return sides


def _flat_boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements [start, end) of a flattened array as (corner, lengths) of boxes: at most two a dimension."""
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = start // row, (end - 1) // row
    if first == last:
        rest = _flat_boxes(shape[1:], start - first * row, end - first * row)
        yield from (((first, *corner), (1, *lengths)) for corner, lengths in rest)
        return
    whole_first, whole_end = -(-start // row), end // row
    if start < whole_first * row:
        yield from _flat_boxes(shape, start, whole_first * row)
    if whole_first < whole_end:
        yield (whole_first, *(0 for _ in shape[1:])), (whole_end - whole_first, *shape[1:])
    if whole_end * row < end:
        yield from _flat_boxes(shape, whole_end * row, end)
