"""Where every element of every parameter lives.

A *bucket* is a flat run of parameters that travels in one collective. It is cut into equal *shards*, one for each rank
that holds the same parameters, so its gradients are one reduce-scatter and its parameters one all-gather. A *slot* is a
parameter inside a bucket; a *slice* is the part of a parameter that lies in one rank's shard, in the parameter's own
coordinates, which mean the same under any world size, bucket size and framework.

Integers only: nothing here touches an array. Offsets and lengths count elements unless a name says `nbytes`.

[Note: Bucket padding]
Padding stands in two places and nowhere else. Before a slot, so that each parameter starts on an `ALIGNMENT_NBYTES`
boundary (DLPack imports a view without a copy only then). At the end of a bucket, so that it divides into equal aligned
shards. Padding belongs to some rank's shard but to no slice; it is zero and stays zero, hence it adds nothing to a norm
and an elementwise update leaves it alone. Boundaries are aligned for `ALIGNMENT_ITEMSIZE`-byte elements too, whatever
the parameter's own type, because master weights and moments of another type share the bucket's offsets.

[Note: Uneven blocks]
Where a tensor is cut along axes of the mesh, ranks may hold blocks of different lengths (7 heads over 2 ranks). Each
slot has room for the longest of them, so that buckets, offsets and shards are the same numbers on every rank, and what
ranks decide from those numbers is the same too. The rest of the room is padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import ShardingError

ALIGNMENT_NBYTES = 64
ALIGNMENT_ITEMSIZE = 2  # the smallest floating element; 64 bytes of it are also whole cache lines of every wider one


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter in a bucket: it fills the bucket's elements [offset, end)."""

    param: ParamSpec
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.param.numel


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, start + length) of the flattened parameter `fqn`, at `shard_offset` of its owner's shard."""

    fqn: str
    start: int
    length: int
    shard_offset: int


@dataclass(frozen=True, slots=True)
class BucketKind:
    """The properties that all parameters of a bucket share: element type, optimizer group, whether it is trained, and
    the unit if any.

    `persistent`: under sharded parameters these stay whole on every rank, because gathering them would cost more than
    it saves. `cut`: the axes of the mesh along which other ranks hold other blocks; the rest shards the bucket.
    `row_numel` above 0: gradients travel as rows of so many elements, and the parameter has its bucket to itself.
    """

    dtype: DType
    group: int
    trainable: bool
    unit: str = ""
    persistent: bool = False
    cut: tuple[str, ...] = ()
    row_numel: int = 0


@dataclass(frozen=True)
class Bucket:
    """A flat run of slots of one kind, `numel` elements with padding, cut into `world_size` equal shards: one for each
    of the ranks that hold the same parameters, whose numbers count among those."""

    index: int
    kind: BucketKind
    slots: tuple[Slot, ...]
    numel: int
    world_size: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.world_size

    def shard_bounds(self, rank: int) -> tuple[int, int]:
        """The bucket's elements [low, high) that `rank` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def slices(self, rank: int) -> tuple[Slice, ...]:
        """The parameter runs in `rank`'s shard, in the order in which they lie there; none if it is all padding."""
        low, high = self.shard_bounds(rank)
        return tuple(
            Slice(slot.param.fqn, start=begin - slot.offset, length=end - begin, shard_offset=begin - low)
            for slot in self.slots
            if (begin := max(low, slot.offset)) < (end := min(high, slot.end))
        )


@dataclass(frozen=True)
class ShardLayout:
    """Every parameter's place, in every rank of `mesh`. Equal on all ranks when built from equal arguments, except for
    the lengths of uneven blocks."""

    buckets: tuple[Bucket, ...]
    mesh: Mesh

    @property
    def world_size(self) -> int:
        """All ranks, whatever they hold."""
        return self.mesh.world_size

    @cached_property
    def params(self) -> tuple[ParamSpec, ...]:
        """Every parameter, bucket by bucket: the global parameter order in which norms are added."""
        return tuple(slot.param for bucket in self.buckets for slot in bucket.slots)

    @cached_property
    def position(self) -> dict[str, int]:
        """Each parameter's index in `params`."""
        return {param.fqn: index for index, param in enumerate(self.params)}

    @cached_property
    def _places(self) -> dict[str, tuple[Bucket, Slot]]:
        return {slot.param.fqn: (bucket, slot) for bucket in self.buckets for slot in bucket.slots}

    def locate(self, fqn: str) -> tuple[Bucket, Slot]:
        """The bucket and slot of a parameter. Raises ShardingError for a name that was not laid out."""
        try:
            return self._places[fqn]
        except KeyError:
            raise ShardingError(
                f"no parameter {fqn!r} in this layout of {len(self._places)} parameters", value=fqn
            ) from None

    def slices(self, rank: int) -> Iterator[tuple[Bucket, Slice]]:
        """The slices that `rank` owns, bucket by bucket: the unit of optimizer state and of checkpoints."""
        for bucket in self.buckets:
            for piece in bucket.slices(self.mesh.place(bucket.kind.cut, rank)):
                yield bucket, piece


def plan_layout(
    params: Sequence[ParamSpec],
    *,
    mesh: Mesh,
    max_bucket_numel: int,
    units: Mapping[str, str] | None = None,
    persistent: Set[str] = frozenset(),
    rooms: Mapping[str, int] = MappingProxyType({}),
    parts: Mapping[str, str] = MappingProxyType({}),
) -> ShardLayout:
    """Fill buckets with `params` in the given order, which should be that in which gradients appear or units run.

    A bucket holds parameters of one `BucketKind` and at most `max_bucket_numel` elements before its closing padding; a
    larger parameter has a bucket to itself. `units` maps a parameter's name to its unit; buckets do not cross units,
    and the parameters of a unit that another one interrupts do not share a bucket. `persistent` parameters belong to no
    unit and come last. `rooms` has the most elements that any rank holds of a parameter whose blocks are uneven.
    Parameters of different `parts` share no bucket: their gradients come in different passes. One whose gradients
    travel as rows shares none either.
    Raises ShardingError for a repeated name.
    """
    if max_bucket_numel < 1:
        raise ShardingError(f"{max_bucket_numel=} must be at least 1", value=max_bucket_numel)

    runs: list[tuple[BucketKind, list[Slot]]] = []
    open_runs: dict[tuple[BucketKind, str], list[Slot]] = {}
    seen: set[str] = set()
    last_unit = ""
    for param in sorted(params, key=lambda param: param.fqn in persistent):
        if param.fqn in seen:
            raise ShardingError(
                f"parameter {param.fqn!r} appears twice",
                hint="tied parameters are laid out once, under their first name",
                value=param.fqn,
            )
        seen.add(param.fqn)

        stays = param.fqn in persistent
        unit = "" if stays else (units or {}).get(param.fqn, "")
        if unit != last_unit:
            open_runs.clear()
            last_unit = unit
        cut = tuple(axis for axis in param.cut if mesh.has_several(axis))
        row_numel = param.numel // param.shape[0] if param.has_row_grads and param.trainable else 0
        kind = BucketKind(param.dtype, param.group, param.trainable, unit, stays, cut, row_numel)
        part = parts.get(param.fqn, "")
        run = None if row_numel else open_runs.get((kind, part))
        offset = _round_up(_end(run[-1], rooms), _alignment(param.dtype)) if run else 0
        if run is None or offset + rooms.get(param.fqn, param.numel) > max_bucket_numel:
            run, offset = [], 0
            runs.append((kind, run))
            if not row_numel:
                open_runs[kind, part] = run
        run.append(Slot(param, offset))

    buckets = []
    for index, (kind, run) in enumerate(runs):
        # Padded so that it is cut into equal shards that start aligned, none of them empty.
        ranks = mesh.size_of(mesh.others(kind.cut))
        numel = _round_up(max(1, _end(run[-1], rooms)), ranks * _alignment(kind.dtype))
        buckets.append(Bucket(index, kind, tuple(run), numel, ranks))
    return ShardLayout(tuple(buckets), mesh)


def _end(slot: Slot, rooms: Mapping[str, int]) -> int:
    """Where the room of a slot ends."""
    return slot.offset + rooms.get(slot.param.fqn, slot.param.numel)


def _alignment(dtype: DType) -> int:
    """Elements between possible starts."""
    return ALIGNMENT_NBYTES // min(dtype.itemsize, ALIGNMENT_ITEMSIZE)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
