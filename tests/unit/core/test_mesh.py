"""Ranks and coordinates are two names for one thing, and the lines along an axis cut the mesh into equal groups."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.core.mesh import Mesh, MeshAxis
from polyaccel.errors import ShardingError

meshes = st.lists(st.integers(1, 4), max_size=4).map(
    lambda sizes: Mesh(tuple(MeshAxis(f"axis{index}", size) for index, size in enumerate(sizes)))
)


@settings(deadline=None)
@given(meshes)
def test_a_rank_is_where_its_coordinates_are(mesh: Mesh) -> None:
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    assert [mesh.rank_at(place) for place in places] == list(range(mesh.world_size))
    assert all(list(place) == [axis.name for axis in mesh.axes] for place in places)


@settings(deadline=None)
@given(meshes)
def test_lines_along_an_axis_tile_the_mesh(mesh: Mesh) -> None:
    for axis in mesh.axes:
        lines = {mesh.line(axis.name, rank) for rank in range(mesh.world_size)}
        assert sorted(rank for line in lines for rank in line) == list(range(mesh.world_size))
        for line in lines:
            assert len(line) == axis.size == mesh.axis_size(axis.name)
            assert [mesh.coordinates(rank)[axis.name] for rank in line] == list(range(axis.size))
            assert all(mesh.line(axis.name, rank) == line for rank in line)


def test_the_last_axis_varies_fastest() -> None:
    mesh = Mesh((MeshAxis("data", 2), MeshAxis("sequence", 3)))
    assert mesh.coordinates(4) == {"data": 1, "sequence": 1}
    assert mesh.line("sequence", 4) == (3, 4, 5)
    assert mesh.line("data", 4) == (1, 4)


def test_plain_data_parallelism_is_one_axis() -> None:
    mesh = Mesh.flat(3)
    assert (mesh.world_size, mesh.axis_size("data"), mesh.line("data", 1)) == (3, 3, (0, 1, 2))


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(ShardingError) as caught:
        Mesh.flat(6).coordinates(rank)
    assert caught.value.value == rank


@pytest.mark.parametrize("index", [-1, 3])
def test_coordinates_outside_are_refused(index: int) -> None:
    with pytest.raises(ShardingError) as caught:
        Mesh.flat(3).rank_at({"data": index})
    assert "'data'" in str(caught.value)


@pytest.mark.parametrize("coordinates", [{}, {"data": 0, "tensor": 0}])
def test_coordinates_name_every_axis_and_no_other(coordinates: dict[str, int]) -> None:
    with pytest.raises(ShardingError) as caught:
        Mesh.flat(3).rank_at(coordinates)
    assert caught.value.value == coordinates
    assert "data" in caught.value.hint


def test_an_unknown_axis_is_refused_with_those_there_are() -> None:
    mesh = Mesh((MeshAxis("data", 2), MeshAxis("sequence", 3)))
    with pytest.raises(ShardingError) as caught:
        mesh.axis_size("tensor")
    assert caught.value.value == "tensor"


def test_repeated_and_empty_axes_are_refused() -> None:
    with pytest.raises(ShardingError) as caught:
        Mesh((MeshAxis("data", 2), MeshAxis("data", 3)))
    assert caught.value.value == ["data", "data"]
    with pytest.raises(ShardingError) as caught:
        Mesh.flat(0)
    assert caught.value.value == 0
    assert "'data'" in str(caught.value)


def test_a_group_has_the_ranks_that_differ_along_its_axes_alone() -> None:
    mesh = Mesh((MeshAxis("data", 2), MeshAxis("sequence", 1), MeshAxis("tensor", 3)))
    assert mesh.group(("tensor",), 4) == (3, 4, 5)
    assert mesh.group(("data", "tensor"), 4) == tuple(range(6))
    assert mesh.group((), 4) == (4,)
    assert mesh.groups(("data",)) == ((0, 3), (1, 4), (2, 5))
    assert mesh.others(("tensor",)) == ("data",)
    assert [mesh.place(("tensor",), rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert (mesh.size_of(("data", "tensor")), mesh.has_several("sequence")) == (6, False)
