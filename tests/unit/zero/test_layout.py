"""The layout covers every element of every parameter exactly once, whatever the sizes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import ShardingError
from polyaccel.zero.plan.layout import ALIGNMENT_NBYTES, BucketKind, ShardLayout, plan_layout

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=12)
floats = st.sampled_from([dtype for dtype in DType if dtype.is_floating])
MASTER_ITEMSIZE = 4


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[ParamSpec], ShardLayout, int]:
    params = [
        ParamSpec(f"layer.{index}", shape, draw(floats), draw(st.integers(0, 1)), draw(st.booleans()))
        for index, shape in enumerate(draw(shapes))
    ]
    units = {param.fqn: draw(st.sampled_from(["a", "b"])) for param in params if draw(st.booleans())}
    cap = draw(st.integers(1, 400))
    layout = plan_layout(params, mesh=Mesh.flat(draw(st.integers(1, 9))), max_bucket_numel=cap, units=units)
    for bucket in layout.buckets:
        for slot in bucket.slots:
            kind = BucketKind(slot.param.dtype, slot.param.group, slot.param.trainable, units.get(slot.param.fqn, ""))
            assert bucket.kind == kind
    return params, layout, cap


Case = tuple[list[ParamSpec], ShardLayout, int]


@settings(deadline=None)
@given(layouts())
def test_every_element_has_exactly_one_owner(case: Case) -> None:
    params, layout, _ = case
    owned = {param.fqn: [0] * param.numel for param in params}
    for rank in range(layout.world_size):
        for _, piece in layout.slices(rank):
            assert piece.length > 0
            for element in range(piece.start, piece.start + piece.length):
                owned[piece.fqn][element] += 1
    assert all(count == 1 for counts in owned.values() for count in counts)


@settings(deadline=None)
@given(layouts())
def test_a_slice_lies_in_its_shard_where_it_says(case: Case) -> None:
    _, layout, _ = case
    for rank in range(layout.world_size):
        for bucket, piece in layout.slices(rank):
            home, slot = layout.locate(piece.fqn)
            assert home is bucket
            assert slot.offset + piece.start == bucket.shard_bounds(rank)[0] + piece.shard_offset
            assert 0 <= piece.shard_offset <= bucket.shard_numel - piece.length


@settings(deadline=None)
@given(layouts())
def test_shards_tile_their_bucket(case: Case) -> None:
    _, layout, _ = case
    for index, bucket in enumerate(layout.buckets):
        bounds = [bucket.shard_bounds(rank) for rank in range(layout.world_size)]
        assert [low for low, _ in bounds] + [bucket.numel] == [0] + [high for _, high in bounds]
        assert bucket.index == index
        assert bucket.shard_numel > 0


@settings(deadline=None)
@given(layouts())
def test_slots_do_not_overlap_and_padding_is_less_than_asked_for(case: Case) -> None:
    _, layout, _ = case
    for bucket in layout.buckets:
        grain = 2 * ALIGNMENT_NBYTES // MASTER_ITEMSIZE  # 64 bytes of the smallest floats, 128 of master weights
        end = 0
        for slot in bucket.slots:
            assert 0 <= slot.offset - end < grain
            end = slot.end
        assert 0 <= bucket.numel - end <= layout.world_size * grain


@settings(deadline=None)
@given(layouts())
def test_parameters_and_shards_start_aligned_in_every_type(case: Case) -> None:
    _, layout, _ = case
    for bucket in layout.buckets:
        for itemsize in (bucket.kind.dtype.itemsize, MASTER_ITEMSIZE):
            assert bucket.shard_numel * itemsize % ALIGNMENT_NBYTES == 0
            assert all(slot.offset * itemsize % ALIGNMENT_NBYTES == 0 for slot in bucket.slots)


@settings(deadline=None)
@given(layouts())
def test_buckets_keep_the_order_and_the_cap(case: Case) -> None:
    params, layout, cap = case
    assert sorted(layout.position, key=lambda fqn: layout.position[fqn]) == [param.fqn for param in layout.params]
    order = {param.fqn: index for index, param in enumerate(params)}
    for bucket in layout.buckets:
        places = [order[slot.param.fqn] for slot in bucket.slots]
        assert places == sorted(places)
        assert bucket.slots[-1].end <= cap or len([slot for slot in bucket.slots if slot.param.numel]) == 1
    firsts = [order[bucket.slots[0].param.fqn] for bucket in layout.buckets]
    assert firsts == sorted(firsts)
    assert sorted(order) == sorted(param.fqn for param in layout.params)


def _cut(layout: ShardLayout, values: dict[str, list[int]]) -> dict[tuple[int, int], list[int]]:
    """What each (rank, bucket) holds; -1 stands for padding."""
    shards = {(rank, b.index): [-1] * b.shard_numel for rank in range(layout.world_size) for b in layout.buckets}
    for rank in range(layout.world_size):
        for bucket, piece in layout.slices(rank):
            part = values[piece.fqn][piece.start : piece.start + piece.length]
            shards[rank, bucket.index][piece.shard_offset : piece.shard_offset + piece.length] = part
    return shards


def _put_together(layout: ShardLayout, shards: dict[tuple[int, int], list[int]]) -> dict[str, list[int]]:
    values = {param.fqn: [-1] * param.numel for param in layout.params}
    for rank in range(layout.world_size):
        for bucket, piece in layout.slices(rank):
            part = shards[rank, bucket.index][piece.shard_offset : piece.shard_offset + piece.length]
            values[piece.fqn][piece.start : piece.start + piece.length] = part
    return values


@settings(deadline=None)
@given(layouts(), st.integers(1, 9), st.integers(1, 400))
def test_slices_carry_values_to_another_world_and_bucket_size(case: Case, world_size: int, cap: int) -> None:
    params, layout, _ = case
    values = {param.fqn: [1000 * index + i for i in range(param.numel)] for index, param in enumerate(params)}
    other = plan_layout(params, mesh=Mesh.flat(world_size), max_bucket_numel=cap)
    moved = _cut(other, _put_together(layout, _cut(layout, values)))
    assert _put_together(other, moved) == values


def test_a_scalar_has_a_place_and_an_empty_parameter_none() -> None:
    params = [ParamSpec("scale", (), DType.FLOAT32), ParamSpec("empty", (0, 3), DType.FLOAT32)]
    layout = plan_layout(params, mesh=Mesh.flat(3), max_bucket_numel=100)
    pieces = [(rank, piece.fqn) for rank in range(3) for _, piece in layout.slices(rank)]
    assert pieces == [(0, "scale")]  # the shards of ranks 1 and 2 are all padding
    assert layout.locate("empty")[1].param.numel == 0


def test_a_bucket_of_nothing_still_travels() -> None:
    layout = plan_layout([ParamSpec("empty", (0,), DType.FLOAT32)], mesh=Mesh.flat(2), max_bucket_numel=10)
    assert [bucket.shard_numel for bucket in layout.buckets] == [32]


def test_a_model_without_parameters_has_no_buckets() -> None:
    layout = plan_layout([], mesh=Mesh.flat(2), max_bucket_numel=10)
    assert (layout.buckets, layout.params) == ((), ())


def test_a_parameter_larger_than_the_cap_has_a_bucket_to_itself() -> None:
    sizes = (10, 500, 10, 10)
    params = [ParamSpec(f"p{index}", (size,), DType.FLOAT32) for index, size in enumerate(sizes)]
    layout = plan_layout(params, mesh=Mesh.flat(2), max_bucket_numel=100)
    assert [[slot.param.fqn for slot in bucket.slots] for bucket in layout.buckets] == [["p0"], ["p1"], ["p2", "p3"]]


@pytest.mark.parametrize(("cap", "buckets"), [(132, 1), (131, 2)])
def test_the_cap_is_the_last_size_that_fits(cap: int, buckets: int) -> None:
    params = [ParamSpec("a", (10,), DType.FLOAT32), ParamSpec("b", (100,), DType.FLOAT32)]
    layout = plan_layout(params, mesh=Mesh.flat(1), max_bucket_numel=cap)
    assert layout.buckets[-1].slots[-1].end in (32 + 100, 100)  # `b` starts at 32, the next aligned place
    assert len(layout.buckets) == buckets


def test_a_repeated_name_is_refused_with_the_cure() -> None:
    twice = [ParamSpec("head.weight", (2, 3), DType.FLOAT32)] * 2
    with pytest.raises(ShardingError) as caught:
        plan_layout(twice, mesh=Mesh.flat(2), max_bucket_numel=100)
    assert caught.value.value == "head.weight"


def test_an_impossible_size_is_refused() -> None:
    with pytest.raises(ShardingError) as caught:
        plan_layout([], mesh=Mesh.flat(2), max_bucket_numel=0)
    assert caught.value.value == 0
    assert "max_bucket_numel=0" in str(caught.value)


def test_an_unknown_name_is_refused() -> None:
    layout = plan_layout([ParamSpec("a", (2,), DType.FLOAT32)], mesh=Mesh.flat(1), max_bucket_numel=10)
    with pytest.raises(ShardingError) as caught:
        layout.locate("b")
    assert caught.value.value == "b"
