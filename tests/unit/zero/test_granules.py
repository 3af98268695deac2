"""Shards that end at granules: these stay whole, everything has one owner, and loads are balanced."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyaccel.core.mesh import Mesh
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import ShardingError
from polyaccel.zero.plan.bucket_plan import plan_step
from polyaccel.zero.plan.layout import ALIGNMENT_NBYTES, ROW, WHOLE, Granule, ShardLayout, plan_layout
from polyaccel.zero.plan.policy import StepPolicy, TrafficPolicy, ZeroPolicy

BLOCK = Granule("block", 256)
shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=12)


def laid_out(
    shapes: list[tuple[int, ...]], ranks: int, granule: Granule, cap: int = 1 << 20, trained: bool = True
) -> ShardLayout:
    params = [ParamSpec(f"p{at}", shape, DType.FLOAT32, 0, trained) for at, shape in enumerate(shapes)]
    granules = {param.fqn: granule for param in params}
    return plan_layout(params, mesh=Mesh.flat(ranks), max_bucket_numel=cap, granules=granules)


def owned_bytes(layout: ShardLayout) -> list[int]:
    ranks = range(layout.world_size)
    return [sum(4 * bucket.shard_numel_of(rank) for bucket in layout.buckets) for rank in ranks]


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(1, 5), st.sampled_from([WHOLE, ROW, BLOCK]), st.sampled_from([300, 5000, 1 << 20]))
def test_slices_are_whole_granules_and_cover_everything_once(shapes, ranks, granule, cap):
    layout = laid_out(shapes, ranks, granule, cap)
    found: dict[str, list[tuple[int, int]]] = {param.fqn: [] for param in layout.params}
    for rank in range(ranks):
        for bucket, piece in layout.slices(rank):
            low, high = bucket.shard_bounds(rank)
            assert 0 <= piece.shard_offset <= high - low - piece.length
            found[piece.fqn].append((piece.start, piece.start + piece.length))
    for param in layout.params:
        pieces = sorted(found[param.fqn])
        assert [0, *(end for _, end in pieces)] == [*(start for start, _ in pieces), param.numel]
        if ranks > 1:
            assert all(end % granule.length_in(param) == 0 for _, end in pieces[:-1])
    for bucket in layout.buckets:
        starts = [bucket.shard_bounds(rank)[0] for rank in range(ranks)]
        assert all(start * 2 % ALIGNMENT_NBYTES == 0 or start == bucket.numel for start in starts)
        assert bucket.counts is None or sum(bucket.counts) == bucket.numel


@pytest.mark.parametrize("numels", [[64, 64, 64, 64], [320, 64, 64, 64, 64, 64], [32, 320, 32, 320], [640]], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_bucket_is_cut_as_well_as_order_allows(numels, ranks):
    """Against every way to cut it."""
    (bucket,) = laid_out([(numel,) for numel in numels], ranks, WHOLE).buckets
    ends = [slot.offset for slot in bucket.slots] + [bucket.numel]
    every = combinations([*ends, *([0] * ranks), *([bucket.numel] * ranks)], ranks - 1)
    best = min(max(high - low for low, high in pairwise([0, *sorted(cuts), bucket.numel])) for cuts in every)
    assert max(bucket.counts) == best


def test_loads_of_all_buckets_are_balanced_together():
    layout = laid_out([(64, 10)] * 9, 3, WHOLE, cap=640)
    assert len(layout.buckets) == 9
    assert owned_bytes(layout) == [4 * 640 * 3] * 3


def test_frozen_parameters_are_cut_equally_and_so_is_what_has_no_granule():
    frozen = laid_out([(10, 10), (3,)], 2, WHOLE, trained=False)
    params = [ParamSpec("a", (10, 10), DType.FLOAT32), ParamSpec("b", (10, 10), DType.FLOAT32)]
    mixed = plan_layout(params, mesh=Mesh.flat(2), max_bucket_numel=1000, granules={"a": WHOLE})
    plain = plan_layout(params[1:], mesh=Mesh.flat(2), max_bucket_numel=1000)
    assert [bucket.counts for bucket in frozen.buckets] == [None]
    assert [bucket.counts is None for bucket in mixed.buckets] == [False, True]
    assert mixed.buckets[1].numel == plain.buckets[0].numel
    with pytest.raises(ShardingError):
        _ = mixed.buckets[0].shard_numel


def test_each_rank_plans_its_own_shards():
    layout = laid_out([(100,), (7, 9), (50,)], 3, WHOLE)
    zero = ZeroPolicy.of_stage(3)
    plans = [plan_step(layout, zero, StepPolicy(), state_names=("m",), rank=rank) for rank in range(3)]
    (bucket,) = layout.buckets
    for plan, count in zip(plans, bucket.counts, strict=True):
        (own,) = plan.trained
        assert {own.params.numel, own.gradient.numel, own.states["m"].numel} == {count}
    assert plan_step(layout, zero, StepPolicy()).trained[0].params.numel == max(bucket.counts)
    with pytest.raises(ShardingError):
        plan_step(layout, zero, StepPolicy(), traffic=TrafficPolicy(gradient_bits=4))


def test_owners_are_balanced_by_what_an_update_costs():
    shapes = [(64,), (64,), (64,), (64,)]
    params = [ParamSpec(f"p{at}", shape, DType.FLOAT32, 0, True) for at, shape in enumerate(shapes)]
    given = {
        "mesh": Mesh.flat(2),
        "max_bucket_numel": 1 << 20,
        "granules": dict.fromkeys(["p0", "p1", "p2", "p3"], WHOLE),
    }
    assert plan_layout(params, **given).buckets[0].counts == (128, 128)
    assert plan_layout(params, costs={"p0": 300, "p1": 100, "p2": 100, "p3": 100}, **given).buckets[0].counts == (
        64,
        192,
    )


@pytest.mark.parametrize("granule", [WHOLE, ROW, BLOCK, Granule()])
def test_shards_are_as_long_as_ranks_are_able(granule):
    params = [ParamSpec(f"p{at}", (4, 256), DType.FLOAT32, 0, True) for at in range(6)]
    granules = {param.fqn: granule for param in params}
    given = {"mesh": Mesh.flat(3), "max_bucket_numel": 1 << 20, "granules": granules}
    (bucket,) = plan_layout(params, capacities=[1, 0.5, 1.5], **given).buckets
    assert bucket.counts is not None
    assert sum(bucket.counts) == bucket.numel == 6 * 1024
    assert bucket.counts == (2048, 1024, 3072)


@pytest.mark.parametrize("capacities", [[1.0], [1.0, 0.0], [1.0, float("inf")], [1.0, -1.0]], ids=str)
def test_capacities_are_positive_numbers_one_a_rank(capacities):
    with pytest.raises(ShardingError) as caught:
        plan_layout(
            [ParamSpec("p", (8,), DType.FLOAT32)], mesh=Mesh.flat(2), max_bucket_numel=99, capacities=capacities
        )
    assert caught.value.value == tuple(capacities)
