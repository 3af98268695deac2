"""Named axes over ranks. Integers only: which ranks stand on a line along an axis, and where a rank stands.

Ranks fill the mesh row-major: the last axis varies fastest, so neighbours along it are neighbours on a host.

Where ranks with their own batches share experts, the axis `data` is two, `expert_data` and `expert`: its name stands
for both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import product
from math import prod

from polyaccel.errors import ShardingError

_TOGETHER = {"data": ("expert_data", "expert")}
"""Names of several axes."""


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of a mesh: a name (`data`, `sequence`, ...) and how many ranks stand along it."""

    name: str
    size: int


@dataclass(frozen=True)
class Mesh:
    """Ranks 0..world_size-1 arranged along named axes. Raises ShardingError for empty or repeated axes."""

    axes: tuple[MeshAxis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise ShardingError(f"mesh axes {names} repeat a name", hint="give every axis its own name", value=names)
        for axis in self.axes:
            if axis.size < 1:
                raise ShardingError(
                    f"mesh axis {axis.name!r} has size {axis.size}", hint="sizes are at least 1", value=axis.size
                )

    @classmethod
    def flat(cls, world_size: int) -> Mesh:
        """The mesh of plain data parallelism: one axis, `data`."""
        return cls((MeshAxis("data", world_size),))

    @property
    def world_size(self) -> int:
        return prod(axis.size for axis in self.axes)

    def axis_size(self, name: str) -> int:
        if not self.within((name,)):
            known = ", ".join(axis.name for axis in self.axes)
            raise ShardingError(f"the mesh has no axis {name!r}", hint=f"its axes are: {known}", value=name)
        return self.size_of((name,))

    def within(self, names: Collection[str]) -> tuple[str, ...]:
        """The axes that `names` stand for, in order."""
        wanted = {each for name in names for each in (name, *_TOGETHER.get(name, ()))}
        return tuple(axis.name for axis in self.axes if axis.name in wanted)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands along every axis."""
        if not 0 <= rank < self.world_size:
            raise ShardingError(f"rank {rank} is outside a mesh of {self.world_size}", value=rank)
        place: dict[str, int] = {}
        for axis in reversed(self.axes):
            rank, place[axis.name] = divmod(rank, axis.size)
        return {axis.name: place[axis.name] for axis in self.axes}

    def rank_at(self, coordinates: dict[str, int]) -> int:
        """The rank at `coordinates`, one entry an axis; the inverse of `coordinates`."""
        if coordinates.keys() != {axis.name for axis in self.axes}:
            known = ", ".join(axis.name for axis in self.axes)
            raise ShardingError(
                f"{coordinates} does not name every mesh axis once", hint=f"its axes are: {known}", value=coordinates
            )
        rank = 0
        for axis in self.axes:
            if not 0 <= coordinates[axis.name] < axis.size:
                raise ShardingError(
                    f"{coordinates} is outside mesh axis {axis.name!r} of {axis.size}", value=coordinates
                )
            rank = rank * axis.size + coordinates[axis.name]
        return rank

    def line(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks that share every coordinate with `rank` but the one along axis `name`, in order."""
        return self.group((name,), rank)

    def group(self, names: Collection[str], rank: int) -> tuple[int, ...]:
        """Return ranks with `rank`'s coordinates except along `names`, in mesh order."""
        here = self.coordinates(rank)
        inside = self.within(names)
        free = [axis for axis in self.axes if axis.name in inside]
        places = product(*(range(axis.size) for axis in free))
        return tuple(
            self.rank_at({**here, **{axis.name: at for axis, at in zip(free, place, strict=True)}}) for place in places
        )

    def groups(self, names: Collection[str]) -> tuple[tuple[int, ...], ...]:
        """Every `group` of these axes once, by its first rank."""
        return tuple(dict.fromkeys(self.group(names, rank) for rank in range(self.world_size)))

    def others(self, names: Collection[str]) -> tuple[str, ...]:
        """The axes with more than one rank that are not in `names`, in order."""
        inside = self.within(names)
        return tuple(axis.name for axis in self.axes if axis.size > 1 and axis.name not in inside)

    def size_of(self, names: Collection[str]) -> int:
        """How many ranks stand in a `group` of these axes."""
        inside = self.within(names)
        return prod(axis.size for axis in self.axes if axis.name in inside)

    def has_several(self, name: str) -> bool:
        """Whether there is an axis `name` with more than one rank."""
        return self.size_of((name,)) > 1

    def place(self, cut: Collection[str], rank: int) -> int:
        """The place of `rank` among those that hold the same blocks of tensors which are cut along the axes `cut`."""
        return self.group(self.others(cut), rank).index(rank)
