"""DeepSpeed's names for where ranks stand along axes, over polyaccel's mesh."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from polyaccel.core.mesh import Mesh, MeshAxis


class ProcessTopology:
    """Ranks along `axes` with `dims` ranks each, the last axis fastest. Raises polyaccel's ShardingError, a ValueError,
    for axes that do not exist and ranks outside."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = list(axes)
        self.dims = list(dims)
        self._mesh = Mesh(tuple(MeshAxis(axis, dim) for axis, dim in zip(axes, dims, strict=True)))
        self.ProcessCoord = namedtuple("ProcessCoord", axes)  # type: ignore[misc]
        self.mapping = {self.get_coord(rank): rank for rank in range(self._mesh.world_size)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at these coordinates, one for each axis."""
        return self._mesh.rank_at(coord_kwargs)

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """The rank's coordinates as text, for example `model_00`."""
        coordinates = self._mesh.coordinates(rank)
        return outer_sep.join(
            f"{axis}{inner_sep}{coordinates[axis]:02d}" for axis in self.axes if axis not in omit_axes
        )

    def get_dim(self, axis: str) -> int:
        """How many ranks stand along `axis`; 0 if there is none of the name."""
        return self._mesh.axis_size(axis) if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The rank's coordinates as a named tuple."""
        return self.ProcessCoord(**self._mesh.coordinates(rank))

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ along `axis` alone."""
        return [list(ranks) for ranks in self._mesh.groups((axis,))] if axis in self.axes else []

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks with these coordinates."""
        places = ((rank, self._mesh.coordinates(rank)) for rank in range(self._mesh.world_size))
        return [rank for rank, place in places if all(place[axis] == at for axis, at in filter_kwargs.items())]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks whose coordinate along `axis` is `idx`."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return self._mesh.world_size


class PipeDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, each with ranks that have their own data."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, ranks with their own data, and ranks that share layers."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])
