"""Where every element of every parameter lives.

A *bucket* is a flat run of parameters that travels in one collective. It is cut into *shards*, one for each rank
that holds the same parameters, so its gradients are one reduce-scatter and its parameters one all-gather. Shards are
equal unless the bucket has a *granule* that they must not cut. A *slot* is a parameter inside a bucket; a *slice* is
the part of a parameter that lies in one rank's shard, in the parameter's own coordinates, which mean the same under any
world size, bucket size and framework.

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

[Note: Uneven shards]
Some updates look at more than one element: at a matrix, a row, a block with a common scale. The shards of such a bucket
end where a granule ends, so their lengths differ, down to none. Slots keep the order of the bucket, because
norms are added in that order. Each bucket is cut so that the rank with the most work of all buckets so far has as
little as possible. The work is bytes, or what the update costs (`costs`), over what a rank can do (`capacities`). A cut
lies at an aligned offset: rows and blocks are taken together until they end at one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil, inf, lcm
from types import MappingProxyType
from typing import Literal

from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import ShardingError

ALIGNMENT_NBYTES = 64
ALIGNMENT_ITEMSIZE = 2  # the smallest floating element; 64 bytes of it are also whole cache lines of every wider one


@dataclass(frozen=True, slots=True)
class Granule:
    """What of a parameter a shard holds whole or not at all: an `element`, a `block` of `numel` elements, a `row` (all
    that the first index selects), or the `whole` parameter."""

    kind: Literal["element", "block", "row", "whole"] = "element"
    numel: int = 1

    def length_in(self, param: ParamSpec) -> int:
        """The elements of one granule of `param`."""
        if self.kind == "whole":
            return max(1, param.numel)
        if self.kind == "row" and param.numel:
            return param.numel // param.shape[0] if param.shape else 1
        return self.numel


ELEMENT = Granule()
"""Shards end anywhere, so they are equal."""
ROW, WHOLE = Granule("row"), Granule("whole")


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
    `granule`: what shards do not cut.
    """

    dtype: DType
    group: int
    trainable: bool
    unit: str = ""
    persistent: bool = False
    cut: tuple[str, ...] = ()
    row_numel: int = 0
    granule: Granule = ELEMENT


@dataclass(frozen=True)
class Bucket:
    """A flat run of slots of one kind, `numel` elements with padding, cut into `world_size` shards: one for each of the
    ranks that hold the same parameters, whose numbers count among those.

    Shards are equal where `bounds` is empty. Else it has `world_size + 1` offsets: rank r owns from the r-th to the
    next. See [Note: Uneven shards].
    """

    index: int
    kind: BucketKind
    slots: tuple[Slot, ...]
    numel: int
    world_size: int
    bounds: tuple[int, ...] = ()

    @property
    def shard_numel(self) -> int:
        """The length of each shard. Raises ShardingError where they differ."""
        if self.bounds:
            raise ShardingError(f"the shards of bucket {self.index} differ in length", value=self.counts)
        return self.numel // self.world_size

    @cached_property
    def counts(self) -> tuple[int, ...] | None:
        """The length of each rank's shard, as collectives take it; None where all are equal."""
        return tuple(high - low for low, high in pairwise(self.bounds)) or None

    def shard_numel_of(self, rank: int) -> int:
        """The length of a rank's shard."""
        return self.numel // self.world_size if self.counts is None else self.counts[rank]

    @property
    def max_shard_numel(self) -> int:
        """The length of the longest shard."""
        return self.numel // self.world_size if self.counts is None else max(self.counts)

    def shard_bounds(self, rank: int) -> tuple[int, int]:
        """The bucket's elements [low, high) that `rank` owns."""
        if self.bounds:
            return self.bounds[rank], self.bounds[rank + 1]
        numel = self.numel // self.world_size
        return rank * numel, (rank + 1) * numel

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
    granules: Mapping[str, Granule] = MappingProxyType({}),
    costs: Mapping[str, int] = MappingProxyType({}),
    capacities: Sequence[float] = (),
) -> ShardLayout:
    """Fill buckets with `params` in the given order, which should be that in which gradients appear or units run.

    A bucket holds parameters of one `BucketKind` and at most `max_bucket_numel` elements before its closing padding; a
    larger parameter has a bucket to itself. `units` maps a parameter's name to its unit; buckets do not cross units,
    and the parameters of a unit that another one interrupts do not share a bucket. `persistent` parameters belong to no
    unit and come last. `rooms` has the most elements that any rank holds of a parameter whose blocks are uneven.
    Parameters of different `parts` share no bucket: their gradients come in different passes. One whose gradients
    travel as rows shares none either. `granules` has what shards must not cut of trained parameters, and `costs` the
    work for each of their elements, which is its bytes without one.

    `capacities` has what each rank can do, in proportion: shards of all trained parameters are as long then.
    Raises ShardingError for a repeated name, and for capacities that are not positive numbers, one a rank of the mesh.
    """
    _check_capacities(capacities, mesh)
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
        granule = granules.get(param.fqn, ELEMENT) if param.trainable else ELEMENT
        kind = BucketKind(param.dtype, param.group, param.trainable, unit, stays, cut, row_numel, granule)
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
    loads: dict[tuple[str, ...], list[Fraction]] = {}
    for index, (kind, run) in enumerate(runs):
        ranks, end = mesh.size_of(mesh.others(kind.cut)), max(1, _end(run[-1], rooms))
        is_uneven = kind.granule != ELEMENT or (bool(capacities) and kind.trainable)
        if not is_uneven or ranks == 1:
            # Padded so that it is cut into equal shards that start aligned, none of them empty.
            numel = _round_up(end, ranks * _alignment(kind.dtype))
            buckets.append(Bucket(index, kind, tuple(run), numel, ranks))
            continue
        numel = _round_up(end, _alignment(kind.dtype))
        cuts = _possible_cuts(run, numel, kind, rooms)
        work = _Work([costs.get(slot.param.fqn, kind.dtype.itemsize) for slot in run], cuts)
        shares = [Fraction(1)] * ranks if not capacities else _capacities_of(kind.cut, capacities, mesh)
        bounds = _balanced(cuts, work, loads.setdefault(kind.cut, [Fraction(0)] * ranks), shares)
        buckets.append(Bucket(index, kind, tuple(run), numel, ranks, bounds))
    return ShardLayout(tuple(buckets), mesh)


def _possible_cuts(
    run: Sequence[Slot], numel: int, kind: BucketKind, rooms: Mapping[str, int]
) -> Sequence[tuple[int, int]]:
    """Where shards may end in a bucket of `numel` elements: (first, step) for each slot, for every offset from `first`
    on in steps until the next slot; last its end."""
    found = []
    for slot in run:
        room = rooms.get(slot.param.fqn, slot.param.numel)
        step = lcm(kind.granule.length_in(slot.param), _alignment(kind.dtype))
        found.append((slot.offset, numel if kind.granule.kind == "whole" or step >= room else step))
    return [*found, (numel, 1)]


class _Work:
    """The work up to each offset of a bucket, where slot i has `rates[i]` for each element from its first offset on."""

    def __init__(self, rates: Sequence[int], cuts: Sequence[tuple[int, int]]) -> None:
        self._rates, self._starts = rates, [first for first, _ in cuts]
        parts = (rate * (end - at) for rate, (at, end) in zip(rates, pairwise(self._starts), strict=True))
        self._sums = list(accumulate(parts, initial=0))

    @property
    def total(self) -> int:
        return self._sums[-1]

    def until(self, offset: int) -> int:
        """The work of all elements before `offset`."""
        at = min(bisect_right(self._starts, offset) - 1, len(self._rates) - 1)
        return self._sums[at] + self._rates[at] * (offset - self._starts[at])

    def reach(self, work: int) -> int:
        """The last offset with at most so much work before it."""
        if work >= self.total:
            return self._starts[-1]
        at = bisect_right(self._sums, work) - 1
        return self._starts[at] + (work - self._sums[at]) // self._rates[at]


def _balanced(
    cuts: Sequence[tuple[int, int]], work: _Work, loads: list[Fraction], capacities: Sequence[Fraction]
) -> tuple[int, ...]:
    """Cut a bucket at some of `cuts` so that the largest of `loads`, in work over capacity, becomes as small as it can;
    add what each rank gets."""
    numel = cuts[-1][0]

    def bounds_within(most: int) -> tuple[int, ...]:
        bounds = [0]
        for load, capacity in zip(loads, capacities, strict=True):
            room = int(max(Fraction(0), most - load) * capacity)
            bounds.append(_last_cut(cuts, bounds[-1], work.reach(work.until(bounds[-1]) + room)))
        return tuple(bounds)

    low, high = 0, ceil(max(loads) + work.total / min(capacities)) + 1  # within `high` the first rank has room for all
    while low < high:
        middle = (low + high) // 2
        if bounds_within(middle)[-1] == numel:
            high = middle
        else:
            low = middle + 1
    bounds = bounds_within(low)
    for rank, (begin, end) in enumerate(pairwise(bounds)):
        loads[rank] += (work.until(end) - work.until(begin)) / capacities[rank]
    return bounds


def _check_capacities(capacities: Sequence[float], mesh: Mesh) -> None:
    if capacities and (len(capacities) != mesh.world_size or not all(0 < one < inf for one in capacities)):
        raise ShardingError(
            f"{list(capacities)} are not the capacities of {mesh.world_size} ranks",
            hint="give one positive number for each rank",
            value=tuple(capacities),
        )


def _capacities_of(cut: tuple[str, ...], capacities: Sequence[float], mesh: Mesh) -> list[Fraction]:
    """The capacity of each shard of a bucket: that of the weakest rank that has it."""
    found: dict[int, Fraction] = {}
    for rank, capacity in enumerate(capacities):
        place, own = mesh.place(cut, rank), max(Fraction(1, 1000), Fraction(capacity).limit_denominator(1000))
        found[place] = min(own, found.get(place, own))
    return [found[place] for place in sorted(found)]


def _last_cut(cuts: Sequence[tuple[int, int]], start: int, limit: int) -> int:
    """The last of `cuts` up to `limit`, `start` if none is behind it."""
    at = bisect_right(cuts, limit, key=lambda cut: cut[0]) - 1
    first, step = cuts[at]
    stop = cuts[at + 1][0] if at + 1 < len(cuts) else first + 1
    return max(start, first + (min(limit, stop - 1) - first) // step * step)


def _end(slot: Slot, rooms: Mapping[str, int]) -> int:
    """Where the room of a slot ends."""
    return slot.offset + rooms.get(slot.param.fqn, slot.param.numel)


def _alignment(dtype: DType) -> int:
    """Elements between possible starts."""
    return ALIGNMENT_NBYTES // min(dtype.itemsize, ALIGNMENT_ITEMSIZE)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
