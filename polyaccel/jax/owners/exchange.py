"""Exchanges with the ranks that own parameters: slices of buckets to and from owners, and values of programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.jax.elementwise.graph import Node
from polyaccel.zero.plan.layout import Bucket, Slice

Place = Callable[[str, int], tuple[str, int]]
"""From element `start` of a parameter of the engine to the caller's parameter and the element of that."""


@dataclass(frozen=True)
class Owners:
    """The rank that updates each parameter as a whole: `of` among `ranks`, which exchange values of programs, and
    `in_step` among the ranks that have slices of it; None where these have it whole, and each is an owner."""

    ranks: Communicator
    of: Mapping[str, int]
    in_step: Mapping[str, int] | None
    saves: bool = True
    """Whether this rank saves the states that it has, and no other rank has them too."""


def balanced_owners(numels: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the rank that owns each parameter, the largest first to the rank with the fewest elements."""
    load, owners = [0] * world_size, dict[str, int]()
    for name in sorted(numels, key=lambda name: -numels[name]):
        owners[name] = load.index(min(load))
        load[owners[name]] += numels[name]
    return owners


class SliceExchange:
    """The slices of one bucket on their way to the owners of whole parameters, and back."""

    def __init__(self, communicator: Communicator, bucket: Bucket, owners: Mapping[str, int], place: Place) -> None:
        self._communicator, self._bucket = communicator, bucket
        ranks, own = range(communicator.world_size), communicator.rank

        def owner(piece: Slice) -> int:
            return owners[place(piece.fqn, piece.start)[0]]

        mine = bucket.slices(own)
        self._here = [[piece for piece in mine if owner(piece) == rank] for rank in ranks]
        """This rank's slices by their owner."""
        self._there = [[piece for piece in bucket.slices(rank) if owner(piece) == own] for rank in ranks]
        """The slices that this rank owns by their holder."""
        self._place = place

    def to_owners(self, shard: Buffer, label: str) -> Iterator[tuple[str, int, Buffer]]:
        """Send slices of `shard`; yield the caller's parameter, the first element, and the piece. Collective."""
        source = self._communicator.allocate(_total(self._here), shard.dtype)
        for at, piece in _placed(self._here):
            source.view(at, piece.length).copy_from(shard.view(piece.shard_offset, piece.length))
        out = self._moved(source, self._here, self._there, label)
        for at, piece in _placed(self._there):
            name, start = self._place(piece.fqn, piece.start)
            yield name, start, out.view(at, piece.length)

    def from_owners(self, whole: Mapping[str, Buffer], shard: Buffer, label: str) -> None:
        """Fill `shard` with the owners' values of its slices. Collective."""
        source = self._communicator.allocate(_total(self._there), shard.dtype)
        for at, piece in _placed(self._there):
            name, start = self._place(piece.fqn, piece.start)
            source.view(at, piece.length).copy_from(whole[name].view(start, piece.length))
        out = self._moved(source, self._there, self._here, label)
        for at, piece in _placed(self._here):
            shard.view(piece.shard_offset, piece.length).copy_from(out.view(at, piece.length))

    def _moved(
        self, source: Buffer, sent: Sequence[Sequence[Slice]], received: Sequence[Sequence[Slice]], label: str
    ) -> Buffer:
        counts = [sum(piece.length for piece in of_rank) for of_rank in received]
        out = self._communicator.allocate(sum(counts), source.dtype)
        self._communicator.all_to_all(
            out,
            source,
            counts=counts,
            source_counts=[sum(piece.length for piece in of_rank) for of_rank in sent],
            label=label,
            bucket=self._bucket.index,
        )
        return out


def _total(by_rank: Sequence[Sequence[Slice]]) -> int:
    return sum(piece.length for of_rank in by_rank for piece in of_rank)


def _placed(by_rank: Sequence[Sequence[Slice]]) -> Iterator[tuple[int, Slice]]:
    """Each slice with its place in a buffer that travels."""
    at = 0
    for piece in (piece for of_rank in by_rank for piece in of_rank):
        yield at, piece
        at += piece.length


def gather_values(
    communicator: Communicator, wanted: Sequence[tuple[int, Node]], values: dict[int, Any], label: str
) -> None:
    """Add to `values`, by index, the `wanted` nodes of other ranks. Collective."""
    counts = [0] * communicator.world_size
    for holder, node in wanted:
        counts[holder] += _nbytes(node)
    if not sum(counts):
        return
    own = b"".join(np.asarray(values[node.index]).tobytes() for at, node in wanted if at == communicator.rank)
    out, source = (communicator.allocate(count, DType.UINT8) for count in (sum(counts), len(own)))
    if own:
        source.from_bytes(own)
    communicator.all_gather(out, source, counts=counts, label=label)
    data = out.to_bytes()
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    for holder, node in wanted:
        start, starts[holder] = starts[holder], starts[holder] + _nbytes(node)
        if holder != communicator.rank:
            found = np.frombuffer(data[start : starts[holder]], node.dtype)
            values[node.index] = jnp.asarray(found.reshape(node.shape))


def _nbytes(node: Node) -> int:
    return prod(node.shape) * int(np.dtype(node.dtype).itemsize)
